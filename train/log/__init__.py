"""Measures a run's metrics, and shows and writes its results."""
