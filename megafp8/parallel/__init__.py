"""How the ranks of a run are laid out and grouped."""
