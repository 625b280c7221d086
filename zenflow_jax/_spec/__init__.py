"""Decisions made before the first step: static and hashable, without arrays."""
