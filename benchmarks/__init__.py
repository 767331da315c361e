"""How fast fedflat is, and how much memory it takes: `python -m benchmarks` measures, README.md shows the latest."""
