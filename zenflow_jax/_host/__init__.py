"""The host half: NumPy only. It uses no jax array, no queue, and only its kernels' threads."""
