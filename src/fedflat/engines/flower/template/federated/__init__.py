"""A federation that fedflat trains."""
