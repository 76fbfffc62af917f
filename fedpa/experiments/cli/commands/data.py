"""`fedpa data`: find, download, describe and deal data sets."""

from collections.abc import Sequence

from rich.console import Console

from fedpa.discovery import match_name, suggest
from fedpa.errors import FedpaError
from fedpa.experiments.cli import datasets, partitioning

SUMMARY = "find, download, describe and partition data sets"

COMMANDS = {
    "list": (datasets.list_data_sets, "the benchmarks' data sets, and where each was found"),
    "get": (datasets.get, "download data sets; what broke off is resumed"),
    "info": (datasets.info, "what a data set holds, beside the paper's table 2"),
    "partition": (partitioning.main, "deal a data set without clients to clients"),
}


def main(argv: Sequence[str], console: Console) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        _help(console)
        return
    word = match_name(argv[0], COMMANDS)
    if word is None:
        raise FedpaError(f"unknown command {'data ' + argv[0]!r}: {suggest(argv[0], COMMANDS)}")
    COMMANDS[word][0](argv[1:], console)


def _help(console: Console) -> None:
    console.print(f"usage: fedpa data COMMAND [OPTIONS]\n\n{SUMMARY.capitalize()}.\n\ncommands:")
    for name, (_, summary) in COMMANDS.items():
        console.print(f"  {name:<10} {summary}", highlight=False, markup=False)
    console.print(
        "\nData sets are looked for in --data-dir if it is given, else in the directory that\n"
        "FEDPA_DATA (of the environment) names and in your own data directory.\n\n"
        "fedpa data COMMAND --help lists a command's options.",
        highlight=False,
        markup=False,
    )
