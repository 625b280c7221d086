"""What is decided before the first step: static, hashable, without arrays."""
