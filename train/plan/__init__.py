"""The memory and speed of a run, before it starts."""
