"""Methods and the mechanisms that they are lists of."""
