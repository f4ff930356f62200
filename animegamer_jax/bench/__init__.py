"""`animegamer bench`: how fast the programs are, and PyTorch beside them."""
