"""The state of a run as trees for checkpoints, and the way back."""
