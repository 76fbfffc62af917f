"""The shape of the code base: who may import whom, and that no file is a drawer."""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

import fedpa

PACKAGE = Path(fedpa.__file__).parent
# A row imports only rows above it (and itself). The library comes first, then the laboratory.
LIBRARY = [
    {"atomic_write", "errors", "lapack", "lazy", "places", "precision", "types", "watching"},
    {"objectives"},
    {"samplers"},
    {"precisions"},
    {"sites"},
    {"deltas"},
    {"server"},
    {"privacy"},
    {"algorithms"},
    {"engines"},
    {"data"},
    {"metrics"},
    {"training"},
    {"posterior"},
    {"flower"},
]
LABORATORY = [
    {"hyperparameters", "download", "staged_files"},
    {"methods", "catalogue", "privacy"},
    {"models"},
    {"tasks"},
    {"config", "evaluation", "run", "estimate", "workers"},
    {"flower"},
    {"report"},
    {"posterior"},
    {"sweeps"},
    {"comparison"},
    {"studies"},
    {"cli"},
]
ROWS = [*LIBRARY, *({f"experiments.{name}" for name in row} for row in LABORATORY)]
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row}
FILES = [
    path
    for path in PACKAGE.rglob("*.py")
    if path.parent != PACKAGE and path != PACKAGE / "experiments" / "__init__.py"
]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    parts = [name.split(".") for name in names if name.startswith("fedpa.")]
    return {row_of(part[1:]) for part in parts} & set(RANK)


def row_of(parts: Sequence[str]) -> str:
    """A package, or one of the laboratory's."""
    return ".".join(parts[:2]) if parts[0] == "experiments" else parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_rows_above(path):
    own = row_of(path.relative_to(PACKAGE).with_suffix("").parts)
    assert own in RANK, f"{own} has no place in the table of rows"
    below = {name for name in imported(path) if RANK[name] > RANK[own]}
    assert not below, f"{path.name} imports {below} from below its row"


def test_algorithm_layers_know_nothing_of_files_or_printing():
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] in {r for row in LIBRARY[:7] for r in row}:
            tree = ast.parse(path.read_text())
            names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            assert not names & {"open", "print"}, path


def test_no_file_is_a_drawer():
    drawers = {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert not drawers & {path.name for path in PACKAGE.rglob("*.py")}


def test_every_file_says_what_it_is():
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path
