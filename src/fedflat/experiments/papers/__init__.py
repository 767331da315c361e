"""The papers' experiments as data, one file per paper."""
