"""Methods: one file, one method."""
