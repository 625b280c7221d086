"""A run's reports: counts, a timeline, warnings."""
