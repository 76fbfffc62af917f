"""The code on pages of the manual, run as a user would run it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.flower.deployment import free_port, run_script

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"# (\S+/\S+\.\w+)\n")
"""First line of a block that is a file."""


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


def is_program(language: str, code: str) -> bool:
    """Whether a block is Python to run, not a file to write."""
    return language == "python" and not FILE.match(code)


def make_script(blocks: list[tuple[str, str]]) -> str:
    """One bash script of `bash`, `python` and `toml` blocks.

    A block whose first line is a comment with a path is written to that file; other Python is a
    program of its own.
    """
    parts = []
    for language, code in blocks:
        if language == "bash":
            parts.append(code)
        elif is_program(language, code):
            parts.append(f"python - <<'PAGE'\n{code}PAGE\n")
        else:
            file = FILE.match(code)
            assert file, code
            path = shlex.quote(file[1])
            parts.append(f"mkdir -p $(dirname {path})\ncat > {path} <<'PAGE'\n{code}PAGE\n")
    return "\n".join(parts)


def run_page(script: str, directory: Path) -> str:
    """What a page's script prints, with free ports in place of the page's."""
    for port in dict.fromkeys(re.findall(r"\b1[89]\d{3}\b", script)):
        script = script.replace(port, str(free_port()))
    return run_script(script, directory)
