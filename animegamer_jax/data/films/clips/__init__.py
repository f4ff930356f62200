"""Clips of a film on disk: records, archives, the store."""
