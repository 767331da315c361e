"""Methods: lists of mechanisms, each of which is one idea."""
