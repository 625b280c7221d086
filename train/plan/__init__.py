"""Plans a run's memory and speed before it starts."""
