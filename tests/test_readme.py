"""README keeps its promises: its example runs and is short, its commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedpa.__main__ import EXTRA

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


CHECK = """
assert result.history[-1]["eval/mse"] < 0.5 * result.history[0]["eval/mse"], result.history
assert {record["phase"] for record in result.history} == {"burn-in", "sampling"}
"""


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run_as_a_user_would_run_them(code, tmp_path):
    """In a process of their own, under JAX's and XLA's ordinary settings."""
    if "fedpa.fit(" in code:
        assert len(code.strip().splitlines()) <= 25
        code += CHECK
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_own_model_needs_the_library_s_dependencies_alone(tmp_path):
    """Recorded, too: what `fedpa[experiments]` installs can't be imported."""
    (code,) = [code for code in EXAMPLES if "fedpa.fit(" in code]
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({EXTRA!r}))\n"
    recorded = code.replace("rounds=30,", "rounds=12, out='run',")
    assert recorded != code
    done = subprocess.run(
        [sys.executable, "-c", blocked + recorded], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()


def test_there_is_an_example_of_ones_own_model():
    assert sum("fedpa.fit(" in code for code in EXAMPLES) == 1


def test_pictures_and_links_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", README):
        assert (ROOT / target).exists(), target


def test_commands_are_make_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", README))
    assert {"run", "test", "setup"} <= named
    assert named <= targets
