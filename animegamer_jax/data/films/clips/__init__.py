"""Clips of the films on disk.

store     the shots folder: a folder a film, what was cut, what was skipped
records   its rows: films, clips and their settings
archive   the zip archive with a film's clips and the pictures of dropped ones
"""
