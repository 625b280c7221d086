"""Tests with Keras, equinox, haliax and datasets: `make test-clients`, in an environment of their own."""
