"""Checkpoints: read safely, written whole, recorded, cut on disk."""
