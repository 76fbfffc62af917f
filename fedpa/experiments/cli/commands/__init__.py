"""One file per command, found by name: `SUMMARY` and `main(argv, console)`."""
