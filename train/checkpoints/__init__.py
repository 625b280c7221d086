"""Checkpoints of a run: written, read, and compared with the run that resumes from them."""
