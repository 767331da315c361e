"""Where clients run: in this process, in worker processes, on a Ray cluster, on the nodes of a real federation."""
