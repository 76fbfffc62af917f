"""`python -m fedpa`."""

from fedpa.cli.main import main

if __name__ == "__main__":
    main()
