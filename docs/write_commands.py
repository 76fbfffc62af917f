"""Writes the options of every command into reference/commands.md, as `--help-all` shows them.

A block of the page that begins with `usage: fedpa COMMAND` is replaced. Sections that `fedpa run`
has word for word are named only.
"""

import contextlib
import io
import os
import re
import textwrap
from pathlib import Path

from fedpa.experiments.cli.main import main

PAGE = Path(__file__).parent / "reference" / "commands.md"
BLOCK = re.compile(r"```text\nusage: fedpa ((?:[a-z]+ )*[a-z]+).*?```", re.DOTALL)


def read_help(command: str) -> str:
    """What `fedpa COMMAND --help-all` prints."""
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "100"
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([*command.split(), "--help-all"])
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    return "\n".join(line.rstrip() for line in said.getvalue().strip().splitlines())


def write_options(page: str) -> str:
    """The page with every command's options as they are now."""
    shared = set(read_help("run").split("\n\n"))

    def write(match: re.Match[str]) -> str:
        sections = read_help(match[1]).split("\n\n")
        same = [part for part in sections if match[1] != "run" and part in shared]
        own = [part for part in sections if part not in same]
        if same:
            titles = "; ".join(part.partition(":")[0] for part in same)
            own.append(textwrap.fill(f"as in fedpa run: {titles}", 100, subsequent_indent="  "))
        return "```text\n" + "\n\n".join(own) + "\n```"

    return BLOCK.sub(write, page)


if __name__ == "__main__":
    PAGE.write_text(write_options(PAGE.read_text("utf-8")), "utf-8")
