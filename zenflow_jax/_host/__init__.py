"""The host half: NumPy only. It knows no jax array, no queue and no thread but its kernels'."""
