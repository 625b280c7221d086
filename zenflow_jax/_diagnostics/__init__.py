"""What a run reports about itself: counts, a timeline, warnings."""
