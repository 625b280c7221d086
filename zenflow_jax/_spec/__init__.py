"""Decisions made before the first step, and the numbers that both halves share."""
