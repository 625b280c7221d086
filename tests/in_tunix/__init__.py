"""Tests with the installed `google-tunix`: `make test-tunix`, in an environment of its own."""
