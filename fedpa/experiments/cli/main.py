"""The `fedpa` command: finds the subcommand and turns errors into one line."""

import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from rich.console import Console

import fedpa
from fedpa.errors import FedpaError, match_name, suggest
from fedpa.experiments.cli.commands import COMMANDS


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; exit 2 on bad input, 130 on Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # θ where the terminal has no Greek letters: ?
            stream.reconfigure(errors="replace")
    console = _Console()
    try:
        if not words or words[0] in ("-h", "--help"):
            _help(console)
        elif words[0] == "help":
            main([*words[1:], "--help"])
        elif words[0] == "--version":
            console.print(f"fedpa {fedpa.__version__}", highlight=False)
        else:
            name = match_name(words[0], COMMANDS)
            if name is None:
                raise FedpaError(f"unknown command {words[0]!r}: {suggest(words[0], COMMANDS)}")
            with warnings.catch_warnings():
                warnings.showwarning = _one_line
                if COMMANDS[name].computes:
                    fedpa.configure()  # before JAX starts its devices
                command = importlib.import_module(f"fedpa.experiments.cli.commands.{name}")
                command.main(words[1:], console)
    except FedpaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


class _Console(Console):
    """Its reader (head, less) may have seen enough: work goes on, and nothing more is said."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help(console: Console) -> None:
    console.print(
        "usage: fedpa COMMAND [OPTIONS]\n\n"
        "Federated learning as posterior inference (FedPA).\n\ncommands:",
        highlight=False,
        markup=False,
    )
    for name, command in COMMANDS.items():
        console.print(f"  {name:<10} {command.summary}", highlight=False)
    console.print(
        "\nfedpa help COMMAND lists a command's options; fedpa --version the version.",
        highlight=False,
    )


def _one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
