"""The papers' experiments and published numbers, one file per paper."""
