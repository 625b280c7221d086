"""Metrics of a run: measured, logged, sent to trackers, and summed up at the end."""
