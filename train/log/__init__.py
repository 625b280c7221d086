"""Measures a run's metrics, logs them, sends them to trackers, and summarizes them."""
