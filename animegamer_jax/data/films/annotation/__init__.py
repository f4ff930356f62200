"""Annotation of clips: who does what, where and when, by a model or by hand.

`annotator` annotates a film with a model's answers; read it first. `prompt` is the question about a
clip, `labels` the record and its files, `manual` reads annotations made by hand, `usage_log` keeps
requests, tokens and costs of all runs.
"""
