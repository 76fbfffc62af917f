"""The `fedpa` command, also as `python -m fedpa`."""

import sys
from collections.abc import Sequence

EXTRA = (
    "filelock",
    "h5py",
    "matplotlib",
    "optuna",
    "plotly",
    "sklearn",
    "tensorboardX",
    "threadpoolctl",
)
"""Packages of `fedpa[experiments]`, by import name, beyond the library's dependencies."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; if a package is missing, print in one line what installs it."""
    try:
        from fedpa.experiments.cli.main import main as run_command

        run_command(argv)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in EXTRA:
            raise
        print(
            f"error: {error.name} is not installed: pip install 'fedpa[experiments]' installs "
            "what the command needs",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
