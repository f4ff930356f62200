"""Released PyTorch checkpoints to bundles and back: one table a network, one strict function."""
