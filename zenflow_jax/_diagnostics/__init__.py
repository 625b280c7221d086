"""Reports about a run: counts, a timeline and warnings."""
