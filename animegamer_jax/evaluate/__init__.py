"""Measuring: parity with recorded numbers of another implementation."""
