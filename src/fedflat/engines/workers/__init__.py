"""Clients in worker processes of one machine."""
