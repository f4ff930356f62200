"""Clips on disk: `store` is the shots folder, `records` its rows, `archive` the clips."""
