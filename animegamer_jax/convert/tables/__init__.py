"""One strict table of weights a network: PyTorch names, our names, transforms."""
