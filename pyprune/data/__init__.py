"""Text -> token windows, disjoint between uses."""
