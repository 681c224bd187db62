"""Serve with vLLM: the plugin with its models and layers, the command, and the limits and releases of vLLM."""
