"""The one training loop, its objectives and optimizers, and recovery."""
