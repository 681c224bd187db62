"""One run: from a request to a written checkpoint."""
