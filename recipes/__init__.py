"""Training recipes (YAML); each opens with the command that runs it."""
