"""Every exported name has a docstring: what it is, its arguments or fields, its result, an example.

The source is read, nothing is imported. A namespace is a package of the library that has an
`__all__`, a module that such a package exports, or one of `MODULES`.
"""

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MODULES = ("fedpa.errors", "fedpa.numpy_client", "fedpa.types")
"""Public modules that no package exports."""


class Definition(NamedTuple):
    module: str
    node: ast.stmt
    docstring: str
    """Of a function or class its own, of anything else the string below its definition."""


def source(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()), None)


@functools.cache
def body(module: str) -> list[ast.stmt]:
    """A module's statements, those of `if TYPE_CHECKING:` among them."""
    statements = []
    for node in ast.parse(source(module).read_text()).body:
        statements += node.body if isinstance(node, ast.If) else [node]
    return statements


def assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def string_below(statements: list[ast.stmt], place: int) -> str:
    match statements[place + 1 : place + 2]:
        case [ast.Expr(ast.Constant(str(text)))]:
            return text
    return ""


def find(module: str, name: str) -> Definition | str:
    """A name's definition, through the modules that import it; a module's name if it is one."""
    statements = body(module)
    for place, node in reversed(list(enumerate(statements))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return Definition(module, node, ast.get_docstring(node) or "")
        if name in assigned(node):
            return Definition(module, node, string_below(statements, place))
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    if node.module == module:
                        return f"{module}.{name}"
                    return find(node.module, alias.name)
    raise LookupError(f"{module} exports {name}, which it does not define or import")


def exported(module: str) -> list[str]:
    """`__all__`; without it, what is defined in the module and has no underscore."""
    names = []
    for node in body(module):
        if "__all__" in assigned(node):
            return ast.literal_eval(node.value)
        names += assigned(node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def namespaces() -> Iterator[str]:
    for path in sorted((ROOT / "fedpa").rglob("__init__.py")):
        module = ".".join(path.parent.relative_to(ROOT).parts)
        if not module.startswith("fedpa.experiments") and "\n__all__ = " in path.read_text():
            yield module
            found = [find(module, name) for name in exported(module) if name != "__version__"]
            yield from (name for name in found if isinstance(name, str))
    yield from MODULES


def missing(definition: Definition) -> list[str]:
    """What a definition's documentation lacks."""
    node, text = definition.node, inspect.cleandoc(definition.docstring)
    if not text:
        return ["docstring"]
    lacking = []
    if not re.search(r"[.:?](\s|$)", text.split("\n\n")[0]):
        lacking.append("first sentence")
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return lacking
    if isinstance(node, ast.FunctionDef):
        lacking += missing_args(node, text)
        returns_none = isinstance(node.returns, ast.Constant) and node.returns.value is None
        if not returns_none and not section(text, "Returns"):
            lacking.append("Returns")
    else:
        lacking += missing_in_class(node, text)
    example = section(text, "Example")
    if ">>>" not in example:
        lacking.append("Example with >>>")
    if "+SKIP" in example:
        lacking.append("Example that runs")
    return lacking


def section(text: str, title: str) -> str:
    found = re.search(rf"^{title}:\n((?: +.*\n|\n)*(?: +.*)?)", text, re.MULTILINE)
    return found[1] if found else ""


def missing_args(function: ast.FunctionDef, text: str) -> list[str]:
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    wanted = {arg.arg for arg in every if arg is not None} - {"self"}
    lines = re.findall(r"^    (\*{0,2}\w[\w*, ]*):", section(text, "Args"), re.MULTILINE)
    told = {name.strip(" *") for line in lines for name in line.split(",")}
    lacking = [f"Args: {name}" for name in sorted(wanted - told)]
    return lacking + [
        f"Args without {name}, which is no parameter" for name in sorted(told - wanted)
    ]


def missing_in_class(node: ast.ClassDef, text: str) -> list[str]:
    lacking = []
    fields = re.findall(r"^    (\w+): \S", section(text, "Args"), re.MULTILINE)
    for place, member in enumerate(node.body):
        if isinstance(member, ast.AnnAssign):
            lacking += [f"Args: {name}" for name in assigned(member) if name not in fields]
            lacking += ["Args in one place"] if string_below(node.body, place) else []
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            lacking += missing_args(member, text)
        elif isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            lacking += [] if ast.get_docstring(member) else [f"docstring of {member.name}"]
    return lacking


@pytest.mark.parametrize("namespace", sorted(set(namespaces())))
def test_every_exported_name_is_documented(namespace):
    lines = []
    for name in exported(namespace):
        found = None if name == "__version__" else find(namespace, name)
        if isinstance(found, Definition):
            lacking = missing(found)
            place = f"{source(found.module).relative_to(ROOT)}:{found.node.lineno}"
            lines += [f"{place}: {name} lacks {', '.join(lacking)}"] if lacking else []
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_what_is_missing_is_found():
    bare = '''
def scale(x, *rest, by=2.0, **more) -> float:
    """Multiply x

    Args:
        x: A number.
        y: No parameter.
    Example:
        >>> scale(1.0)  # doctest: +SKIP
    """


class State(NamedTuple):
    """What is kept.

    Args:
        rho: ρ ≥ 0 (default: 0.1).
        other: Said where `help` does not show it.
    """

    t: int
    rho: float = 0.1
    other: int
    """Another."""

    def show(self): ...
'''
    function, state = ast.parse(bare).body
    lacking = missing(Definition("m", function, ast.get_docstring(function)))
    assert lacking == [
        "first sentence",
        "Args: by",
        "Args: more",
        "Args: rest",
        "Args without y, which is no parameter",
        "Returns",
        "Example that runs",
    ]
    lacking = missing(Definition("m", state, ast.get_docstring(state)))
    assert lacking == [
        "Args: t",
        "Args in one place",
        "docstring of show",
        "Example with >>>",
    ]
