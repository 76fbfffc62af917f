"""The `fedpa` command: find the subcommand, run it, and print errors as one line."""

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
from fedpa.experiments.cli.arguments import HELP, asks_for_help, say
from fedpa.experiments.cli.commands import FEDPA


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; exit 2 on bad input, 130 on Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # prints ? for θ if the terminal has no Greek letters
            stream.reconfigure(errors="replace")
    console = _Console()
    try:
        if words[:1] == ["--version"]:
            say(console, f"fedpa {fedpa.__version__}")
        else:
            _run_command([*words[1:], "--help"] if words[:1] == ["help"] else words, console)
    except FedpaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of the output (head, less) closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


class _Console(Console):
    """Continue without output if its reader (head, less) closed it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(words: Sequence[str], console: Console) -> None:
    """Find the command named by the first arguments, and run it with the others."""
    prog, command = "fedpa", FEDPA
    while command.commands:
        if not words or words[0] in HELP:
            summary = command.summary[0].upper() + command.summary[1:]
            say(console, f"usage: {prog} COMMAND [OPTIONS]\n\n{summary}.\n\ncommands:")
            for name, member in command.commands.items():
                say(console, f"  {name:<10} {member.summary}")
            say(console, f"\n{command.note}")
            return
        found = match_name(words[0], command.commands)
        if found is None:
            asked = f"{prog} {words[0]}".removeprefix("fedpa ")
            raise FedpaError(f"unknown command {asked!r}: {suggest(words[0], command.commands)}")
        prog, command, words = f"{prog} {found}", command.commands[found], words[1:]
    with warnings.catch_warnings():
        warnings.showwarning = _one_line
        if command.options and asks_for_help(words):
            training = importlib.import_module("fedpa.experiments.cli.training_commands")
            training.parse_run_command(getattr(training, command.options), words, prog)
        if command.computes:
            fedpa.configure()  # before JAX starts its devices
        module, _, function = command.function.partition(".")
        defined = importlib.import_module(f"fedpa.experiments.cli.commands.{module}")
        getattr(defined, function)(words, console)


def _one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
