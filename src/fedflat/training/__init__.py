"""Training: rounds in a loop, what is recorded of them, and everything that looks on."""
