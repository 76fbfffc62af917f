"""Without Flower, or with another one: the rest works, and what is needed is said."""

import importlib.metadata
import subprocess
import sys

import pytest

import fedpa.flower
from fedpa.errors import FedpaError

BLOCKED = """
import sys
sys.modules["flwr"] = None  # importing it fails
import fedpa, fedpa.experiments.tasks, fedpa.flower
assert "local" in fedpa.engines.ENGINES
assert "digits" in fedpa.experiments.tasks.tasks()
import fedpa.experiments.cli.main
assert "flower" not in fedpa.engines.ENGINES
"""


def test_the_core_does_not_need_flower():
    subprocess.run([sys.executable, "-c", BLOCKED], check=True, timeout=120)


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(fedpa.flower, "version", lambda name: "1.42.0")
    with pytest.raises(FedpaError, match=r"flwr = '1.42.0': flwr 1.41 is needed; pip install"):
        fedpa.flower.check_version()


def test_none_at_all_is_refused(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fedpa.flower, "version", missing)
    with pytest.raises(FedpaError, match=r"Flower is not installed: flwr 1.41 is needed"):
        fedpa.flower.check_version()
    monkeypatch.delitem(fedpa.flower.__dict__, "client_app", raising=False)  # if it was imported
    with pytest.raises(FedpaError, match="pip install"):
        _ = fedpa.flower.client_app
