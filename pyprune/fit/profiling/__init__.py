"""Measure the time of layers of each width on this machine."""
