"""Templates of model cards (Jinja)."""
