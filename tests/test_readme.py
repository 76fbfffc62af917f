"""README keeps its promises: its example runs and is short, its commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_of_ones_own_model_is_at_most_25_lines_and_runs():
    example = next(code for code in EXAMPLES if "fedpa.fit(" in code)
    assert len(example.strip().splitlines()) <= 25
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    history = names["result"].history
    assert history[-1]["eval/mse"] < 0.5 * history[0]["eval/mse"]
    assert {record["phase"] for record in history} == {"burn-in", "sampling"}


@pytest.mark.parametrize("code", [c for c in EXAMPLES if "fedpa.fit(" not in c])
def test_the_other_examples_run(code):
    exec(compile(code, "README.md", "exec"), {})


def test_pictures_and_links_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", README):
        assert (ROOT / target).exists(), target


def test_commands_are_make_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", README))
    assert {"run", "test", "setup"} <= named
    assert named <= targets
