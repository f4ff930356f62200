"""Benchmarks: their format, and what writes one."""
