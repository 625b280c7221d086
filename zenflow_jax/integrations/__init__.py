"""zenflow in third-party trainers: import the module you need, nothing else imports it."""
