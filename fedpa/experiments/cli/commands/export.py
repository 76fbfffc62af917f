"""`fedpa export`: a run's parameters as a file for other programs."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedpa.experiments.cli.arguments import format_path, parse_words, say
from fedpa.training.loading import export, parse_round


@dataclasses.dataclass(frozen=True)
class ExportCommand:
    """Write a run's parameters to a .npz or .safetensors file. The task's data is not needed."""

    directory: Path = dataclasses.field(metadata={"positional": "DIR"})
    """The run's directory; the run need not be finished."""
    file: Path = dataclasses.field(metadata={"positional": "FILE"})
    """What to write; its ending, .npz or .safetensors, says in which format."""
    params: str = "last"
    """Which parameters: last, best, or the number of a round that has a checkpoint."""
    overwrite: bool = False
    """Replace a file that exists."""


def main(argv: Sequence[str], console: Console) -> None:
    command = parse_words(ExportCommand, argv, "fedpa export")
    which = parse_round("params", command.params)
    t = export(command.directory, command.file, which, command.overwrite)
    say(console, f"parameters of round {t} written to {format_path(command.file)}")
