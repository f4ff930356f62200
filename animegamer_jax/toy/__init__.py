"""The toy world: a procedural anime world with known truth, a plug-in of data and evaluation."""
