"""Scores that the toy world's known truth allows."""
