"""What goes wrong, with a message that is meant to be shown as it is."""

from __future__ import annotations


class ElvesError(Exception):
    """A file could not be made smaller, or not be read again; the message says all there is."""
