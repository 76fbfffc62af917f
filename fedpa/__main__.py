"""`python -m fedpa`."""

from fedpa.experiments.cli.main import main

if __name__ == "__main__":
    main()
