"""The server's round: participation, uploads that are checked and folded, the new model."""
