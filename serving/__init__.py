"""Serving a pruned checkpoint: export, the vLLM plugin, and speed compared with the dense model.

Imported as ``pyprune.serving`` (the folder is mapped to that name when the package is built). Importing it
loads neither torch nor vllm.
"""
