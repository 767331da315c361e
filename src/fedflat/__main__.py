"""`python -m fedflat`."""

from .cli import main

main()
