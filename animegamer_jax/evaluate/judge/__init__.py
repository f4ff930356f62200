"""A vision-language model scores played games.

`judge` asks about many games; read it first. `prompt` is the question about one game, `scores` the
answers, and the agreement of two judges.
"""
