"""Measure how long layers of each width take on this machine."""
