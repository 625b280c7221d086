"""Options: their declarations (`settings.py`), and the command lines and files that set them."""
