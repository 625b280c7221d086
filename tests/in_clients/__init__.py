"""Tests with Keras, equinox and haliax: `make test-clients`, in an environment of their own."""
