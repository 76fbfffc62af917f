"""README keeps its promises: its example runs and is short, its commands exist."""

import re
import subprocess
import sys

import pytest

from fedpa.__main__ import EXTRA
from tests.markdown import ROOT, read_blocks, run_program

README = (ROOT / "README.md").read_text()
EXAMPLES = [code for _, code in read_blocks(README, "python")]


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
    run_program(code, tmp_path)


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


def test_page_one_is_short():
    assert len(README.splitlines()) <= 150


def test_sources_of_the_comparison_are_given():
    used = set(re.findall(r"\]\[(\w+)\]", README))
    assert used == set(re.findall(r"^\[(\w+)\]: https://", README, re.MULTILINE))


def test_commands_are_make_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", README))
    assert {"run", "test", "setup"} <= named
    assert named <= targets
