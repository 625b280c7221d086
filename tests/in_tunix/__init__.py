"""What runs against the installed `google-tunix`: `make test-tunix`, in its own environment."""
