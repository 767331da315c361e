"""Runs on disk: directories, checkpoints, client states."""
