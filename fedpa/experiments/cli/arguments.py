"""From words to a command's dataclass, by tyro; and back: paths and lines as a person reads them.

Nothing here imports JAX: commands that only list things are ready at once.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import tyro
from rich.console import Console

from fedpa.errors import FedpaError, describe_type, match_name, refuse

C = TypeVar("C")


def read_only_options(argv: Sequence[str], options: Mapping[str, int]) -> dict[str, str]:
    """The options given → their values, if there are no other words; else nothing."""
    words, found = list(argv), dict[str, str]()
    while words:
        name, _, value = words.pop(0).partition("=")
        if name not in options:
            return {}
        if options[name] and not value:
            value = words.pop(0) if words else ""
        found[name] = value
    return found


def remove_options(argv: Sequence[str], options: Mapping[str, int]) -> list[str]:
    """The words but for these options and their values."""
    words, kept = list(argv), list[str]()
    while words:
        word = words.pop(0)
        if word in options:
            del words[: options[word]]
        elif word.split("=")[0] not in options:
            kept.append(word)
    return kept


def option(field: str) -> str:
    return "--" + field.replace("_", "-")


def is_given(field: str, argv: Sequence[str]) -> bool:
    """Whether a field is among the words."""
    return any(word.split("=")[0].replace("_", "-") == option(field) for word in argv)


def parse_words(command: type[C], argv: Sequence[str], prog: str, default: C | None = None) -> C:
    """tyro, with its boxed complaints made into one line."""
    hints = _hints(default or command)
    words = _check_values(argv, hints, prog)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, unknown = tyro.cli(
                command,
                args=words,
                prog=prog,
                return_unknown_args=True,
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit as leaving:
        if leaving.code in (0, None):
            raise
        needed = _required(command)
        said = _first_sentences(complaint.getvalue())
        if needed and said.startswith("Missing"):
            said = f"{prog} needs {' and '.join(needed)}"
        raise FedpaError(f"{said} (see {prog} --help)") from None
    if unknown:
        raise FedpaError(_unknown(unknown[0], hints, prog))
    return parsed


def _check_values(argv: Sequence[str], hints: Mapping[str, "_Hint"], prog: str) -> list[str]:
    """Refuse values of another type than their option's; give choices the spelling they have."""
    words, checked = list(argv), list[str]()
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        plain = name.replace("_", "-")
        hint = hints.get(plain) or hints.get("--" + plain.removeprefix("--no-"))
        if hint is None or hint.positional:
            checked.append(word)
        elif hint.type is bool:
            if equals:
                named = option(hint.field)
                raise refuse(hint.field, value, f"takes no value: give {named} or --no{named[1:]}")
            checked.append(word)
        elif equals:
            checked.append(f"{name}={_check_value(hint, value)}")
        elif not words or words[0].partition("=")[0] in hints:
            raise FedpaError(f"{name} needs a value (see {prog} --help)")
        else:
            checked += [name, _check_value(hint, words.pop(0))]
    return checked


def _check_value(hint: "_Hint", text: str) -> str:
    of_union = typing.get_origin(hint.type) in (typing.Union, types.UnionType)
    for kind in typing.get_args(hint.type) if of_union else (hint.type,):
        if typing.get_origin(kind) is Literal:
            choice = match_name(text, typing.get_args(kind))
            if choice is not None:
                return choice
        elif kind in (int, float):
            with contextlib.suppress(ValueError):
                kind(text)
                return text
        elif kind is not types.NoneType or text == "None":
            return text
    raise refuse(hint.field, text, f"must be {describe_type(hint.type)}")


def _first_sentences(box: str) -> str:
    """The text of tyro's error box between its title and its next rule, drawn in any characters."""
    title, *lines = [line.strip("│ ") for line in box.splitlines()] or [""]
    texts = list(itertools.takewhile(lambda line: line.strip("─-╰╯"), _without_rule(lines)))
    return re.sub(r"\s+", " ", " ".join(texts)) or title


def _without_rule(lines: Sequence[str]) -> Sequence[str]:
    return lines if not lines or lines[0].strip("─-") else lines[1:]


def _unknown(word: str, hints: Mapping[str, "_Hint"], prog: str) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r} (see {prog} --help)"
    name = word.split("=")[0]
    if name in hints:
        field = hints[name].field
        return f"unknown option {name}: give the {field} without it, as {prog} {field.upper()}"
    options = [named for named, hint in hints.items() if not hint.positional]
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.7)
    hint = f": did you mean {close[0]}?" if close else ""
    return f"unknown option {word}{hint} (see {prog} --help)"


class _Hint(NamedTuple):
    field: str
    type: Any
    positional: bool


def _hints(command: Any) -> dict[str, _Hint]:
    """Each option of a command's dataclass, or of one of its values → what it takes."""
    found = dict[str, _Hint]()
    kind = command if isinstance(command, type) else type(command)
    annotated = typing.get_type_hints(kind, include_extras=True)
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            found |= _hints(hint)
        else:
            marks = getattr(annotated[name], "__metadata__", ())
            if tyro.conf.Suppress not in marks:
                found[option(name)] = _Hint(name, hint, tyro.conf.Positional in marks)
    return found


def _required(command: Any) -> list[str]:
    """What a command's dataclass has no default for, as its help calls it."""
    missing = dataclasses.MISSING
    return [
        "DIR" if field.name == "directory" else field.name.upper()
        for field in dataclasses.fields(command)
        if field.default is missing and field.default_factory is missing
    ]


def format_path(path: Path) -> str:
    """A path as a person would type it from here."""
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


def say(console: Console, text: str) -> None:
    """Print a line as it is, however long."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


@contextlib.contextmanager
def remove_if_empty(directory: Path) -> Iterator[None]:
    """Remove a directory that is made inside, and its parents, if nothing came to be in them."""
    fresh = [path for path in [directory, *directory.absolute().parents] if not path.exists()]
    try:
        yield
    finally:
        for path in fresh:  # the innermost first; what holds something stays
            with contextlib.suppress(OSError):
                path.rmdir()
