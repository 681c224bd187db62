"""Experiments about methods."""
