"""Several devices and processes: array placement; start, end and failure of processes."""
