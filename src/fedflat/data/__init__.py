"""Data as clients have it: datasets, partitions, federations."""
