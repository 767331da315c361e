"""Straight-line numpy versions of every method, sharing no code with the package."""
