"""Masking and compaction of a model by a plan, compensation and reconstruction."""
