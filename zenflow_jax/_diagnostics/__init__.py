"""What a run says of itself: counts, a timeline, warnings."""
