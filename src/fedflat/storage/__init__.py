"""Runs on disk: directories, checkpoints, vectors of clients."""
