"""zenflow in third-party trainers. Import the module you need; no other module imports it."""
