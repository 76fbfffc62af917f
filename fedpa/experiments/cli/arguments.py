"""From words to a command's dataclass, and its help: both follow from the dataclass's fields.

A field is an option `--field-name VALUE`, a boolean one a flag with its opposite `--no-field-name`.
Fields of dataclasses in it are options of the command, too. A field's metadata may say:

positional: it is an argument without a name; messages call it this
help: what the docstring below the field would say
without: of a dataclass, those of its fields that are no options here

Nothing here imports JAX: commands that only list things are ready at once.
"""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedpa.errors import FedpaError, describe_type, match_name, refuse
from fedpa.experiments.hyperparameters import replace_fields

C = TypeVar("C")
HELP = ("-h", "--help")


class Option(NamedTuple):
    """One field of a command's dataclass, or of a dataclass in it."""

    field: str
    type: Any
    default: Any
    """`dataclasses.MISSING` if it is required."""
    positional: str | None
    owner: Any
    """The dataclass."""

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
    if asks_for_help(argv):
        show_help(command, prog)
    return make_command(command, given, prog)


def asks_for_help(argv: Sequence[str]) -> bool:
    return any(word in HELP for word in argv)


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
            found[field.name] = Option(field.name, hint, default, about.get("positional"), kind)
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
    raise refuse(field, text, f"must be {describe_type(hint)}")


def _explain_unknown(name: str, options: Collection[Option], prog: str) -> str:
    for option in options:
        if option.positional and name == "--" + option.field:
            short = option.field.upper()
            return f"unknown option {name}: give the {option.field} without it, as {prog} {short}"
    names = [option.name for option in options if not option.positional]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    hint = f": did you mean {close[0]}?" if close else ""
    return f"unknown option {name}{hint} (see {prog} --help)"


def show_help(command: Any, prog: str, **parts: Any) -> NoReturn:
    """Print a command's options and exit; `parts` as in `list_options`."""
    options = list_options(command, **parts).values()
    arguments = [option for option in options if option.positional]
    groups: dict[Any, list[Option]] = {"arguments": arguments, command: []}
    for option in options:
        if not option.positional:
            groups.setdefault(option.owner, []).append(option)
    console = Console(highlight=False, markup=False)
    console.print(" ".join(["usage:", prog, "[OPTIONS]", *(option.name for option in arguments)]))
    console.print(f"\n{inspect.getdoc(command)}")
    for owner, members in groups.items():
        if not members:
            continue
        title = owner if isinstance(owner, str) else str(owner.__doc__).split("\n")[0]
        console.print(f"\n{'options' if owner is command else title.rstrip('.')}:")
        table = Table.grid(padding=(0, 2, 0, 0))
        for option in members:
            table.add_row(f"  {option.name}{_describe_value(option)}", Text(_describe(option)))
        console.print(table)
    sys.exit(0)


def _describe(option: Option) -> str:
    text = _describe_fields(option.owner).get(option.field, "")
    if option.default is dataclasses.MISSING:
        return f"{text} (required)"
    if option.default is False or option.default in (None, (), ""):
        return text
    return f"{text} (default: {option.default})"


def _describe_fields(owner: Any) -> dict[str, str]:
    """Each field of a dataclass → what its metadata or the docstring below it says."""
    found = dict[str, str]()
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
    """What follows an option: INT, {sgd,adam}."""
    if option.type is bool:
        return f", {option.opposite}" if option.default is True else ""
    if option.positional:
        return ""
    kinds = typing.get_args(option.type) or (option.type,)
    if typing.get_origin(option.type) is Literal:
        return f" {{{','.join(kinds)}}}"
    names = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
    shown = [names.get(kind) or "|".join(typing.get_args(kind)) for kind in kinds]
    return " " + "|".join(name for name in shown if name)


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
