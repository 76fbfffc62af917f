"""The `fedpa` command: parses arguments and calls the library."""
