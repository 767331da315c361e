"""Experiments as files: one of them, sweeps over many, comparisons, and the papers' own."""
