"""Several devices and processes: placement of arrays, start, end and failure of processes."""
