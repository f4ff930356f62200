"""Data: the toy world, films, motion, and what becomes of them on the way to training."""
