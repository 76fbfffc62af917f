"""Files and messages that were damaged or lie: each is refused by name, or right."""
