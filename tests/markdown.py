"""The code on pages of the manual, run as a user would run it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def read_blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """(language, code) of a page's fenced blocks in these languages, in their order."""
    return re.findall(rf"```({'|'.join(languages)})\n(.*?)```", text, re.DOTALL)


def make_program(blocks: list[tuple[str, str]]) -> str:
    """One Python program of `python` and `sh` blocks; a line of the latter is a fedpa command."""
    parts = []
    for language, code in blocks:
        if language == "sh":
            for line in code.strip().splitlines():
                program, *words = shlex.split(line)
                assert program == "fedpa", line
                parts.append(f"from fedpa.__main__ import main\nmain({words!r})")
        else:
            parts.append(code)
    return "\n".join(parts)


def run_program(code: str, directory: Path) -> None:
    """In a process of its own, with warnings as errors, under JAX's and XLA's ordinary settings."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=directory,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
