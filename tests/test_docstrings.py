"""The examples in docstrings run, and show what they say.

Each sees the names of its module and, as a user's script would import them, `fedpa`, `jax`, `jnp`,
`np` and `optax`. It runs in a directory of its own, with a cache of its own. (`doctest` itself
would overlook functions that jaxtyping has wrapped, so docstrings are taken from the source.)
"""

import ast
import dataclasses
import doctest
import importlib
import pydoc
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa

ROOT = Path(__file__).parents[1]
NAMES = {"fedpa": fedpa, "jax": jax, "jnp": jnp, "np": np, "optax": optax}
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def find_examples() -> Iterator[doctest.DocTest]:
    parser = doctest.DocTestParser()
    for path in sorted((ROOT / "fedpa").rglob("*.py")):
        text = path.read_text()
        if ">>> " not in text:
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Expr(ast.Constant(str(string))) if ">>> " in string:
                    yield parser.get_doctest(string, {}, module, str(path), node.lineno - 1)


def run(example: doctest.DocTest) -> str:
    """What went wrong, with file and line; empty if nothing did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other packages warn of when they are imported
        module = importlib.import_module(example.name)
    example.globs = {**vars(module), **NAMES}
    report: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=report.append, clear_globs=False)
    return "".join(report)


@pytest.mark.parametrize("example", [*find_examples()], ids=lambda e: f"{e.name}:{e.lineno + 1}")
def test_example_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = run(example)
    if report:
        pytest.fail(report, pytrace=False)


def test_a_wrong_example_is_reported_with_its_line():
    text = "Add.\n\n>>> 1 + 1\n3\n"
    report = run(doctest.DocTestParser().get_doctest(text, {}, "fedpa", "sums.py", 10))
    assert 'File "sums.py", line 13' in report


def has_fields(value: object) -> bool:
    return isinstance(value, type) and (
        dataclasses.is_dataclass(value) or hasattr(value, "_fields")
    )


@pytest.mark.parametrize("name", sorted(n for n in fedpa.__all__ if has_fields(getattr(fedpa, n))))
def test_help_tells_what_each_field_is(name):
    kind = getattr(fedpa, name)
    fields = getattr(kind, "_fields", ()) or [field.name for field in dataclasses.fields(kind)]
    shown = pydoc.plain(pydoc.render_doc(kind))
    for field in fields:
        assert re.search(rf"^ \|\s+{field}: \S", shown, re.MULTILINE), field
