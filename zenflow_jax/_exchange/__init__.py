"""All that crosses between device and host, and the threads that take it across."""
