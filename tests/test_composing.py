"""docs/composing.md keeps its promises: its code runs, is short, and imports nothing private."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "composing.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TRUTH = "np.array([1.0, -2.0, 0.5])"
CHECKS = {
    "fedpa.Sampler(": f"assert np.abs(result.params - {TRUTH}).max() < 0.15, result.params",
    "fedpa.client_update(": "assert isinstance(method(fedpa.Objective(min)), fedpa.Algorithm)",
    "fedpa.fed_round(": f"import numpy as np; assert np.abs(theta - {TRUTH}).max() < 0.1, theta",
}


@pytest.mark.parametrize("code", CODE, ids=list(CHECKS))
def test_code_runs_as_a_user_would_run_it(code, tmp_path):
    """In a process of its own, under JAX's ordinary settings."""
    (check,) = [check for word, check in CHECKS.items() if word in code]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{check}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_four_pieces_take_forty_lines_and_one_import():
    (code,) = [code for code in CODE if "fedpa.Sampler(" in code]
    assert len(code.strip().splitlines()) <= 40
    for piece in ("fedpa.Delta(", "aggregation=clipped(", "optax.stateless("):
        assert piece in code
    assert re.findall(r"(?:import|from) (fedpa[\w.]*)", code) == ["fedpa"]
    assert not re.search(r"\b_\w+\.|\._\w+\(", code.replace("._replace(", "("))
