"""`animegamer bench`: times the programs of a turn and the training steps, next to PyTorch if asked."""
