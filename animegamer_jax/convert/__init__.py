"""Released PyTorch checkpoints to bundles and back, and parity with recorded numbers."""
