"""zenflow in third-party trainers. Import the module you need; the library itself does not."""
