"""Training: one loop, one step, a module per stage."""
