"""zenflow in other people's trainers: import the module you need, nothing else imports it."""
