"""Tests with the installed Keras, equinox and haliax: `make test-clients`, in an environment of its own."""
