"""The host half, in NumPy: no jax arrays, no queues, and no threads except the kernels'."""
