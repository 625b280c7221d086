"""Transfers between device and host, and the threads that run them."""
