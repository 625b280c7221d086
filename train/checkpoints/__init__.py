"""A run's checkpoints: written, read, and compared with the run that resumes from them."""
