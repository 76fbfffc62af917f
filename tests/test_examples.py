"""The examples are programs that work."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.long
def test_own_model_trains_and_gives_back_what_is_finished(tmp_path, capsys):
    """A flax model and a table with a client column, recorded; the second call trains nothing."""
    pytest.importorskip("flax")
    specification = importlib.util.spec_from_file_location("own_model", EXAMPLES / "own_model.py")
    own_model = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(own_model)
    first = own_model.main(str(tmp_path / "run"), rounds=15)
    assert [record["phase"] for record in first.history[9:11]] == ["burn-in", "sampling"]
    errors = [record["eval/mse"] for record in first.history]
    assert errors[-1] < 0.6 < errors[0]
    assert "best: round" in capsys.readouterr().out
    again = own_model.main(str(tmp_path / "run"), rounds=15)
    assert again.history == first.history
