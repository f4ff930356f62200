"""From annotated clips to a game dataset.

`grouping` makes the games of one film, `plan` decides what depends on all films, `writer` writes
the dataset, `card` describes it.
"""
