"""Parse arguments into a command's dataclass, and print its help, both from its fields.

A field is an option `--field-name VALUE`; a boolean field is a flag, with `--no-field-name` as its
opposite. Fields of nested dataclasses are options, too. A field's metadata may have:

positional: it is an argument without a name; messages call it this
help: what the docstring below the field, or Args of the class's, would say
value: what help calls its value; its type says it otherwise
without: of a dataclass, those of its fields that are no options here

This module does not import JAX, so that commands that only list things start fast.
"""

import ast
import contextlib
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from rich.console import Console

from fedpa.errors import FedpaError, ask_if_meant, match_name, refuse, refuse_type
from fedpa.experiments.hyperparameters import replace_fields

C = TypeVar("C")
HELP_ALL = "--help-all"
HELP = ("-h", "--help", HELP_ALL)
INDENT = 30
"""Columns of help for options and their values; descriptions follow to the right."""


class Help(NamedTuple):
    """The options that `--help` shows; `--help-all` shows all."""

    common: tuple[str, ...] = ()
    """The fields that most users need, in the order in which they are shown; () for all."""
    groups: Mapping[str, tuple[str, ...]] = {}
    """Title → fields; all others are the command's options."""


class Option(NamedTuple):
    """One field of a command's dataclass, or of a nested one."""

    field: str
    type: Any
    default: Any
    """`dataclasses.MISSING` if it is required."""
    positional: str | None
    owner: Any
    """The dataclass."""
    value: str | None = None
    """Name of the value in help; default: from its type."""

    @property
    def name(self) -> str:
        return self.positional or "--" + self.field.replace("_", "-")

    @property
    def opposite(self) -> str:
        """Whether it is a flag."""
        return f"--no{self.name[1:]}"


def parse_words(command: type[C], argv: Sequence[str], prog: str) -> C:
    """Parse arguments into a command; `--help` prints its options and exits.

    Args:
        command: A dataclass.
        argv: The arguments after the command's name.
        prog: The command's name in messages.
    """
    given = read_words(command, argv, prog)
    if asks_for_help(argv) is not None:
        show_help(command, prog)
    return make_command(command, given, prog)


def asks_for_help(argv: Sequence[str]) -> str | None:
    """Return the help option among the arguments, if any; `--help-all` before others."""
    return max((word for word in argv if word in HELP), default=None, key=len)


def read_words(command: type, argv: Sequence[str], prog: str) -> dict[str, Any]:
    """Parse arguments: field → value of the field's type."""
    options = list_options(command).values()
    expected = [option for option in options if option.positional]
    named = {option.name: option for option in options if not option.positional}
    opposites = {option.opposite: option for option in named.values() if option.type is bool}
    words, given = [word for word in argv if word not in HELP], dict[str, Any]()
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            if not expected:
                raise FedpaError(f"unexpected argument {word!r} (see {prog} --help)")
            field, kind = expected[0].field, expected[0].type
            if typing.get_origin(kind) is tuple:  # takes all that come
                value = convert_text(typing.get_args(kind)[0], word, field)
                given[field] = (*given.get(field, ()), value)
            else:
                given[field] = convert_text(kind, word, field)
                del expected[0]
            continue
        name, equals, text = word.partition("=")
        name = name.replace("_", "-")
        option = named.get(name) or opposites.get(name)
        if option is None:
            raise FedpaError(_explain_unknown(name, options, prog))
        if option.type is bool:
            if equals:
                both = f"{option.name} or {option.opposite}"
                raise refuse(option.field, text, f"takes no value: give {both}")
            given[option.field] = name in named
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise FedpaError(f"{name} needs a value (see {prog} --help)")
            text = words.pop(0)
        given[option.field] = convert_text(option.type, text, option.field)
    return given


def write_words(command: type, given: Mapping[str, Any]) -> list[str]:
    """Format fields as the arguments from which `read_words` reads them."""
    options = list_options(command)
    words = []
    for option in (options[field] for field in given):
        value = given[option.field]
        if option.positional:
            words.append(str(value))
        elif option.type is bool:
            words.append(option.name if value else option.opposite)
        else:
            words.append(f"{option.name}={value}")
    return words


def make_command(command: type[C], given: Mapping[str, Any], prog: str, **parts: Any) -> C:
    """Make the command from the given fields and nested dataclasses `parts`."""
    options = list_options(command).values()
    needed = [option for option in options if option.default is dataclasses.MISSING]
    if not {option.field for option in needed} <= set(given):
        raise FedpaError(
            f"{prog} needs {' and '.join(option.name for option in needed)} (see {prog} --help)"
        )
    made = command(**{option.field: given[option.field] for option in needed}, **parts)
    return replace_fields(made, **given)


def list_options(command: Any, **parts: Any) -> dict[str, Option]:
    """List the options of a dataclass, or of an instance, whose values are then the defaults.

    parts: instances of nested dataclasses, whose values are the defaults of their fields.
    """
    found = dict[str, Option]()
    kind = command if isinstance(command, type) else type(command)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint, about = hints[field.name], field.metadata
        default = field.default if command is kind else getattr(command, field.name)
        if dataclasses.is_dataclass(hint):
            inner = list_options(parts.get(field.name, hint if command is kind else default))
            found |= {n: o for n, o in inner.items() if n not in about.get("without", ())}
        else:
            position, value = about.get("positional"), about.get("value")
            found[field.name] = Option(field.name, hint, default, position, kind, value)
    return found


def convert_text(hint: Any, text: str, field: str) -> Any:
    """Parse text as a value of the type; case and hyphens of choices are ignored."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    if types.NoneType in kinds and text == "None":
        return None
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            choice = match_name(text, typing.get_args(kind))
            if choice is not None:
                return choice
        elif kind is not types.NoneType:
            with contextlib.suppress(ValueError):
                return kind(text)
    raise refuse_type(field, text, hint)


def _explain_unknown(name: str, options: Collection[Option], prog: str) -> str:
    for option in options:
        if option.positional and name == "--" + option.field:
            short = option.field.upper()
            return f"unknown option {name}: give the {option.field} without it, as {prog} {short}"
    names = [option.name for option in options if not option.positional]
    return f"unknown option {name}{ask_if_meant(name, names)} (see {prog} {HELP_ALL})"


def show_help(command: Any, prog: str, shown: Help = Help(), **parts: Any) -> NoReturn:
    """Print a command's options and exit.

    Args:
        command: Its dataclass; its docstring is printed above the options.
        prog: The command's name.
        shown: Which options, and under which titles.
        parts: As in `list_options`.
    """
    options = list_options(command, **parts)
    arguments = [option for option in options.values() if option.positional]
    grouped = {field for fields in shown.groups.values() for field in fields}
    own = [name for name in options if name not in grouped and not options[name].positional]
    groups = {"options": shown.common or own, **shown.groups}
    titled = {"arguments": arguments} | {
        title: [options[field] for field in fields if field in options]
        for title, fields in groups.items()
    }
    console = Console(highlight=False, markup=False)
    names = " ".join(option.name for option in arguments)
    lines = [f"usage: {prog} {names} [OPTIONS]".replace("  ", " "), "", inspect.getdoc(command)]
    for title, members in titled.items():
        if members:
            lines += ["", f"{title}:"]
            lines += [line for one in members for line in _lay_out(one, min(console.width, 100))]
    if shown.common:
        lines += ["", f"{prog} {HELP_ALL} shows all {len(options) - len(arguments)} options."]
    for line in lines:
        say(console, str(line))
    sys.exit(0)


def _lay_out(option: Option, width: int) -> list[str]:
    """Format an option: its name and value, and its description to the right."""
    name = f"  {option.name}{_describe_value(option)}"
    text = textwrap.wrap(_describe(option), max(width - INDENT, 20), break_on_hyphens=False)
    beside = [" " * INDENT + line for line in text]
    if len(name) + 2 > INDENT:
        return [name, *beside]
    return [name + beside[0][len(name) :], *beside[1:]]


def _describe(option: Option) -> str:
    text = _describe_fields(option.owner).get(option.field, "").removesuffix(".")
    if option.default is dataclasses.MISSING:
        return f"{text} (required)"
    if option.default is False or option.default in (None, (), ""):
        return text
    text = re.sub(r" \(default: [^()]*\)$", "", text)  # replaced by the task's default
    return f"{text} (default: {'yes' if option.default is True else option.default})"


def _describe_fields(owner: Any) -> dict[str, str]:
    """Each field of a dataclass → what its metadata, the docstring below it or Args says."""
    text = (inspect.getdoc(owner) or "").partition("\nArgs:\n")[2]
    args = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    found = {name: " ".join(said.split()) for name, said in args}
    (defined,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(defined, ast.ClassDef)
    for pair in itertools.pairwise(defined.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                found[name] = " ".join(text.split())
    return found | {
        field.name: field.metadata["help"]
        for field in dataclasses.fields(owner)
        if "help" in field.metadata
    }


def _describe_value(option: Option) -> str:
    """Format the value of an option: N, PATH, sgd|adam."""
    if option.type is bool:
        return f", {option.opposite}" if option.default is True else ""
    if option.positional:
        return ""
    return f" {option.value or '|'.join(_name_values(option.type))}"


def _name_values(hint: Any) -> list[str]:
    """Name the values of a type: each choice, or a placeholder."""
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    if typing.get_args(hint):
        return [name for kind in typing.get_args(hint) for name in _name_values(kind)]
    return {int: ["N"], float: ["X"], str: ["TEXT"], Path: ["PATH"]}.get(hint, [])


def format_path(path: Path) -> str:
    """Format a path relative to the working directory, if it is below it."""
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


def say(console: Console, text: str) -> None:
    """Print a line without wrapping or markup."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


@contextlib.contextmanager
def remove_if_empty(directory: Path) -> Iterator[None]:
    """Remove a directory that the block creates, and its parents, if they are still empty."""
    fresh = [path for path in [directory, *directory.absolute().parents] if not path.exists()]
    try:
        yield
    finally:
        for path in fresh:  # the innermost first; a directory that is not empty stays
            with contextlib.suppress(OSError):
                path.rmdir()
