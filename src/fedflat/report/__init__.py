"""A page that compares runs: read from their directories, shown in a browser without a network."""
