"""Oracles, which answer one question about a model: what its gradient is at a point."""
