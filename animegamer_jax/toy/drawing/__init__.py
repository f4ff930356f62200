"""Draws the toy world's scenes."""
