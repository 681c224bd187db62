"""A package, so that `tests._support` is ours even where a dependency installs a folder called tests."""
