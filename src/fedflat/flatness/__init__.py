"""How flat a model's surroundings are."""
