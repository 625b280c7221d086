"""Decisions before the first step: static, hashable, without arrays."""
