"""Regularising methods: move knowledge out of what will go, before it goes. One file a method; see ``base.py``."""
