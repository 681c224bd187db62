"""What a forward pass shows."""
