"""Transfers between device and host, and the threads that make them."""
