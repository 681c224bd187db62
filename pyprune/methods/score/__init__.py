"""Scoring methods: find the structures that matter least and remove them. One file a method; see ``base.py``."""
