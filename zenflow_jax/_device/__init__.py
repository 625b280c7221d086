"""The device half: pure functions on jax arrays, which run inside jitted programs."""
