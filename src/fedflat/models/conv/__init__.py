"""Convolutions as they are quickest on a processor."""
