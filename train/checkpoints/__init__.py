"""Writes and reads a run's checkpoints, and compares them with the run that resumes."""
