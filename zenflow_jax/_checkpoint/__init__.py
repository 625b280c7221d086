"""An engine's saved state, as a tree or in files, and its restoration."""
