"""Measurements of forward passes: streams between layers, activations, moments and the effects of training."""
