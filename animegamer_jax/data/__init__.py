"""Data sets: games, their features, and the loader that training reads."""
