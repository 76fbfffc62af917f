"""From words to a command's dataclass, and its help: both follow from the dataclass's fields.

A field is an option `--field-name VALUE`, a boolean one a flag with its opposite `--no-field-name`.
Fields of dataclasses in it are options of the command, too. A field's metadata may say:

positional: it is an argument without a name; messages call it this
help: what the docstring below the field, or Args of the class's, would say
value: what help calls its value; its type says it otherwise
without: of a dataclass, those of its fields that are no options here

Nothing here imports JAX: commands that only list things are ready at once.
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
"""Columns of help that options and their values have; their descriptions are beside them."""


class Help(NamedTuple):
    """What `--help` shows of a command; `--help-all` shows all of its options."""

    common: tuple[str, ...] = ()
    """The fields that most users need, in the order in which they are shown; () for all."""
    groups: Mapping[str, tuple[str, ...]] = {}
    """Title → fields; all others are the command's options."""


class Option(NamedTuple):
    """One field of a command's dataclass, or of a dataclass in it."""

    field: str
    type: Any
    default: Any
    """`dataclasses.MISSING` if it is required."""
    positional: str | None
    owner: Any
    """The dataclass."""
    value: str | None = None
    """What help calls its value; its type says it otherwise."""

    @property
    def name(self) -> str:
        return self.positional or "--" + self.field.replace("_", "-")

    @property
    def opposite(self) -> str:
        """Of a flag."""
        return f"--no{self.name[1:]}"


def parse_words(command: type[C], argv: Sequence[str], prog: str) -> C:
    """The command that the words describe; `--help` among them shows its options and exits.

    Args:
        command: A dataclass.
        argv: The words after the command's name.
        prog: What messages call the command.
    """
    given = read_words(command, argv, prog)
    if asks_for_help(argv) is not None:
        show_help(command, prog)
    return make_command(command, given, prog)


def asks_for_help(argv: Sequence[str]) -> str | None:
    """The word that asks for help, if one does: `--help-all` before others."""
    return max((word for word in argv if word in HELP), default=None, key=len)


def read_words(command: type, argv: Sequence[str], prog: str) -> dict[str, Any]:
    """Each field that the words set → its value, of the field's type."""
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
    """The words from which `read_words` reads these fields."""
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
    """The command with the given fields, and dataclasses in it, `parts`, changed by them."""
    options = list_options(command).values()
    needed = [option for option in options if option.default is dataclasses.MISSING]
    if not {option.field for option in needed} <= set(given):
        raise FedpaError(
            f"{prog} needs {' and '.join(option.name for option in needed)} (see {prog} --help)"
        )
    made = command(**{option.field: given[option.field] for option in needed}, **parts)
    return replace_fields(made, **given)


def list_options(command: Any, **parts: Any) -> dict[str, Option]:
    """The options of a dataclass (or of a value of one, with its defaults), by field.

    parts: values of dataclasses in it, whose fields have their defaults from there.
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
    """The text as a value of the type; choices are known whatever their case and hyphens."""
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
        command: Its dataclass; the docstring is shown above the options.
        prog: What the command is called.
        shown: Which of them, and under which titles.
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
    """The lines of an option: its name and value, beside them what it is."""
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
    text = re.sub(r" \(default: [^()]*\)$", "", text)  # a task's own is in its place
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
    """What follows an option: N, PATH, sgd|adam."""
    if option.type is bool:
        return f", {option.opposite}" if option.default is True else ""
    if option.positional:
        return ""
    return f" {option.value or '|'.join(_name_values(option.type))}"


def _name_values(hint: Any) -> list[str]:
    """The values a type has: each choice, or a word that stands for them."""
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    if typing.get_args(hint):
        return [name for kind in typing.get_args(hint) for name in _name_values(kind)]
    return {int: ["N"], float: ["X"], str: ["TEXT"], Path: ["PATH"]}.get(hint, [])


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
