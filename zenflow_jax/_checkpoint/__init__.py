"""A run's state as trees for checkpoints, and its restoration."""
