"""The options of every stage: torch-free, each with its range beside it."""
