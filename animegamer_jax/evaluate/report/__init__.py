"""The report of an evaluation, as HTML and Markdown.

build               what the report shows, and its sentences (read first)
tables, plots, games   its tables, line plots and example games
summary             the scores in a few lines, for the terminal
render              the templates, in assets/pages
ablations           a file of ablations, which the report shows as well
"""
