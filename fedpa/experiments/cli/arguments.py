"""From words to configuration: tyro over the dataclasses, task defaults and files underneath."""

import contextlib
import dataclasses
import difflib
import io
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from fedpa.errors import FedpaError, refuse
from fedpa.experiments.config import RunConfig, default_config, read_toml
from fedpa.experiments.hyperparameters import SAMPLING_FIELDS, Hyperparameters
from fedpa.experiments.methods import METHODS

C = TypeVar("C")


def parse(command: type[C], argv: Sequence[str], prog: str, method: str | None = None) -> C:
    """Parse `argv` into a command dataclass with a field `run: RunConfig`.

    Values come, last wins, from the task's defaults for the method, the file given by `--config`,
    and the words themselves. `method` overrides the one named.
    """
    # A first pass finds out which task, method and file are meant; the second has their defaults.
    words = [word for word in argv if word not in ("-h", "--help")]
    first: Any = parse_words(command, words, prog, command(run=RunConfig()))  # type: ignore[call-arg]
    if first.config is not None:
        base = read_toml(first.config)
        _refuse_others(first, base)
    else:
        base = default_config(first.run.task, method or first.run.method, first.run.preset)
    parsed: Any = parse_words(command, argv, prog, command(run=base))  # type: ignore[call-arg]
    if method is not None:
        parsed = dataclasses.replace(parsed, run=dataclasses.replace(parsed.run, method=method))
    return parsed


def _refuse_others(first: Any, base: RunConfig) -> None:
    """A file is of one task and preset: half of another's settings are nobody's."""
    plain = RunConfig()
    for field in ("task", "preset"):
        named, of_file = getattr(first.run, field), getattr(base, field)
        if named not in (getattr(plain, field), of_file):
            raise refuse(field, named, f"{first.config} is of {field} {of_file}: leave one out")


def refuse_unused(
    given: Sequence[RunConfig], resolved: Sequence[RunConfig], argv: Sequence[str]
) -> None:
    """An option of the algorithm on the command line that none of the methods reads.

    given, resolved: each method's run, before and after what it fixes itself is put in.
    """

    def reads(before: RunConfig, after: RunConfig, field: str) -> bool:
        if field in SAMPLING_FIELDS and not METHODS[before.method].samples:
            return False
        same = getattr(before.hyperparameters, field) == getattr(after.hyperparameters, field)
        return bool(same)

    for field in (field.name for field in dataclasses.fields(Hyperparameters)):
        if is_given(field, argv) and not any(
            reads(before, after, field) for before, after in zip(given, resolved, strict=True)
        ):
            names = ", ".join(config.method for config in given)
            raise FedpaError(f"{option(field)} does not apply to {names}: leave it out")


def only(argv: Sequence[str], options: Mapping[str, int]) -> dict[str, str]:
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


def without(argv: Sequence[str], options: Mapping[str, int]) -> list[str]:
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
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, unknown = tyro.cli(
                command,
                args=list(argv),
                prog=prog,
                return_unknown_args=True,
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit as leaving:
        if leaving.code in (0, None):
            raise
        raise FedpaError(f"{_first_sentences(complaint.getvalue())} (see {prog} --help)") from None
    if unknown:
        raise FedpaError(_unknown(unknown[0], _options(default or command), prog))
    return parsed


def _first_sentences(box: str) -> str:
    """The text of tyro's error box up to its first rule."""
    lines = []
    for line in box.splitlines():
        text = line.strip("│╭╮╰╯ ")
        if line.startswith("╭"):
            continue
        if not text.strip("─"):
            break
        lines.append(text)
    return re.sub(r"\s+", " ", " ".join(lines)) or box.strip()


def _unknown(word: str, options: Sequence[str], prog: str) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r} (see {prog} --help)"
    close = difflib.get_close_matches(word.split("=")[0], options, n=1, cutoff=0.7)
    hint = f": did you mean {close[0]}?" if close else ""
    return f"unknown option {word}{hint} (see {prog} --help)"


def _options(command: Any) -> list[str]:
    """The options of a command's dataclass, or of one of its values."""
    found = []
    for name, hint in typing.get_type_hints(
        command if isinstance(command, type) else type(command)
    ).items():
        if dataclasses.is_dataclass(hint):
            found += _options(hint)
        else:
            found.append("--" + name.replace("_", "-"))
    return found


def shown(path: Path) -> str:
    """A path as a person would type it from here."""
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)
