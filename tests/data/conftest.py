"""The user's directories of a test are its own."""

import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedpa"


@pytest.fixture
def homes(tmp_path, monkeypatch, cache):
    """No data set of the machine's is found."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.delenv("FEDPA_DATA", raising=False)
    return tmp_path
