"""Metrics of clips and states, and the networks that they need."""
