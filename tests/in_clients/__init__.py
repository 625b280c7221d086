"""Tests with other libraries: `make test-clients`, in an environment of their own."""
