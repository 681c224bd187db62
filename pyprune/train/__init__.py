"""The one training loop, its objectives and optimisers, and recovery."""
