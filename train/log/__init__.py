"""A run's metrics: measured, logged, sent to trackers, and summarized at the end."""
