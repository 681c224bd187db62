"""The options of every stage, each with its range. Imports no torch."""
