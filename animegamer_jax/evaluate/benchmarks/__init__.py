"""Benchmarks: games as data.

format              the dataclasses, and the JSON file (read first)
command             `animegamer evaluate --make`
paper, vocabulary   a benchmark of the paper's size, from a grammar and its words
llm_writer, prompt, spec   a benchmark that a language model writes from lists of words
"""
