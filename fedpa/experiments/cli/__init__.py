"""Commands: thin, no logic of their own."""
