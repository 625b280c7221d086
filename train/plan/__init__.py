"""The memory and the speed of a run, before it starts."""
