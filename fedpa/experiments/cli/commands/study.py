"""`fedpa study`: measure and draw the paper's tables and figures, with controls."""

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fedpa.atomic_write import write_atomically
from fedpa.errors import check_integer, find_name, refuse
from fedpa.experiments.cli.arguments import format_path, parse_words, remove_if_empty, say
from fedpa.experiments.report.figures import render_figure
from fedpa.experiments.staged_files import remove_leftovers, write_together
from fedpa.experiments.studies.study import (
    STAMP,
    Row,
    Settings,
    Study,
    as_csv,
    parse_csv,
    read_csv,
    size,
    studies,
)
from fedpa.training.run_directory import check_free, writing


@dataclasses.dataclass(frozen=True)
class StudyCommand:
    """Rerun and plot the paper's studies.

    examples:
      fedpa study toy --quick --out studies/toy       a small version of one study
      fedpa study all --out studies                   all that take minutes
      fedpa study switch --problems mlp --out DIR     one of a study's real problems
    """

    name: str = dataclasses.field(
        metadata={
            "positional": "NAME",
            "help": "; ".join(f"{name} ({study.summary})" for name, study in studies().items())
            + "; all: those that take minutes.",
        },
    )
    out: Path
    """Directory to write to, new or empty; all writes one directory per study into it."""
    quick: bool = False
    """Measure a smaller version, in about a minute per study; switch takes five."""
    seed: int = 0
    """Random seed, at least 0. The same seed gives the same numbers, except for times."""
    seeds: int | None = None
    """correction, switch, toy: number of seeds, at least 1 (default: depends on the study)."""
    repeats: int | None = None
    """bias-variance, ess: number of problems; timing: number of timings. At least 1 (default:
    depends on the study)."""
    resume: bool = False
    """all: keep the finished studies in the directory and measure the missing ones. switch: keep
    what the directory's CSV has, continue its runs, and measure what is missing."""
    problems: str | None = None
    """switch: problems to measure, separated by commas (default: all)."""
    redraw: Path | None = None
    """Draw from this CSV of the study; nothing is measured."""


def main(argv: Sequence[str], console: Console) -> None:
    command = parse_words(StudyCommand, argv, "fedpa study")
    name = find_name("study", command.name, [*studies(), "all"])
    command = dataclasses.replace(command, name=name)
    minutes = {each: study for each, study in studies().items() if not study.problems}
    chosen = minutes if name == "all" else {name: studies()[name]}
    _check(command, chosen)
    out = command.out
    with remove_if_empty(out):
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out).close()  # refused before the work starts
        for name, study in chosen.items():
            directory = out / name if command.name == "all" else out
            is_there = (directory / f"{name}.csv").exists()
            if command.resume and is_there and not study.problems:
                console.print(f"{name}: kept (already measured)", highlight=False)
                continue
            _run(name, study, command, directory, console)


def _check(command: StudyCommand, chosen: dict[str, Study]) -> None:
    """Check the options before any work starts."""
    for knob in ("seeds", "repeats"):
        value = getattr(command, knob)
        if value is None:
            continue
        check_integer(knob, value, 1)
        if all(study.knob != knob for study in chosen.values()):
            other = next(iter(chosen.values())).knob
            raise refuse(knob, value, f"does not apply to {command.name}: it has --{other}")
    check_integer("seed", command.seed, 0)
    if command.seed >= 2**32:
        raise refuse("seed", command.seed, "must be between 0 and 2³² − 1")
    continues = command.name == "all" or any(study.problems for study in chosen.values())
    if command.resume and not continues:
        raise refuse("resume", True, f"does not apply to {command.name}, which is not resumed")
    _read_problems(command, chosen)
    if command.redraw is not None:
        _check_redraw(command, chosen)
    _check_directory(command, chosen)
    if command.resume:
        for name in chosen:
            directory = command.out / name if command.name == "all" else command.out
            _check_kept(command, directory / f"{name}.csv")


def _read_problems(command: StudyCommand, chosen: dict[str, Study]) -> tuple[str, ...]:
    """Read the names of --problems; refuses others than the study's."""
    if command.problems is None:
        return ()
    known = [name for study in chosen.values() for name in study.problems]
    if not known:
        raise refuse("problems", command.problems, f"does not apply to {command.name}")
    if command.quick:
        raise refuse("problems", command.problems, "--quick has one problem of its own")
    words = [word.strip() for word in command.problems.split(",") if word.strip()]
    if not words:
        raise refuse("problems", command.problems, f"name at least one of {', '.join(known)}")
    return tuple(find_name("problem", word, known) for word in words)


def _check_redraw(command: StudyCommand, chosen: dict[str, Study]) -> None:
    path = command.redraw
    if command.name == "all":
        raise refuse("redraw", str(path), "name the study of this file")
    for option in ("quick", "seed", "seeds", "repeats", "problems"):
        if getattr(command, option):
            raise refuse(option, getattr(command, option), "nothing is measured with --redraw")
    assert path is not None
    if not path.is_file():
        raise refuse("redraw", str(path), "is not a file: give a study's CSV")
    rows = read_csv(path)
    columns = {*chosen[command.name].columns, "quantity", "value", *STAMP}
    if not rows or not {name for row in rows for name in row} <= columns:
        raise refuse("redraw", str(path), f"is not a CSV of the study {command.name}")


def _check_kept(command: StudyCommand, path: Path) -> None:
    """Check that a study to keep has the seed and size that would be measured."""
    if not path.exists():
        return
    rows = read_csv(path)
    wanted = (command.seed, size(command.quick))
    if not rows or (rows[0].get("seed"), rows[0].get("size")) != wanted:
        raise refuse(
            "resume",
            str(path),
            f"was not made with seed {wanted[0]} and {wanted[1]} size: remove it",
        )


def _check_directory(command: StudyCommand, chosen: dict[str, Study]) -> None:
    out = command.out
    check_free(out, overwrite=True)
    for name in chosen:
        remove_leftovers((out / name if command.name == "all" else out) / name)
    if out.is_dir() and any(out.iterdir()) and not command.resume:
        continues = command.name == "all" or chosen[command.name].problems
        resume = " or give --resume" if continues else ""
        raise refuse("out", str(out), f"is not empty: choose another directory{resume}")


def _run(name: str, study: Study, command: StudyCommand, out: Path, console: Console) -> None:
    started = time.perf_counter()
    given = getattr(command, study.knob)
    repeats = study.repeats[command.quick] if given is None else given
    if command.redraw is None:
        measured = out / f"{name}.csv"
        kept = read_csv(measured) if measured.exists() else []

        def keep(rows: list[Row]) -> None:
            with writing(out):
                write_atomically(
                    measured, as_csv(study, rows, command.seed, command.quick).encode()
                )

        problems = _read_problems(command, {name: study})
        with _show_progress(console, name) as tell:
            settings = Settings(command.quick, command.seed, repeats, tell)
            settings = settings._replace(problems=problems, kept=kept, runs=out / "runs", keep=keep)
            rows = study.measure(settings)
        content = as_csv(study, rows, command.seed, command.quick)
    else:
        content = command.redraw.read_text()
    # Drawn from the rows as the file stores them.
    stored = parse_csv(content)
    try:
        figure, extras, findings = study.draw(stored), study.extras(stored), study.findings(stored)
    except (IndexError, KeyError, ValueError, StopIteration):
        if command.redraw is None:
            raise
        raise refuse("redraw", str(command.redraw), "does not have all rows of the study") from None
    files = {f"{name}.{kind}": render_figure(figure, kind) for kind in ("png", "pdf")}
    files |= extras
    files[f"{name}.csv"] = content.encode()  # written last: if it exists, everything does
    with writing(out):
        write_together(out / name, files)
    for finding in findings:
        console.print(finding, highlight=False)
    seconds = time.perf_counter() - started
    say(console, f"written to {format_path(out)}: {', '.join(files)} ({seconds:.0f} s)")


@contextlib.contextmanager
def _show_progress(console: Console, name: str) -> Iterator[Callable[[float, str], None]]:
    """Show progress by fraction: a bar on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield lambda fraction, text: say(console, f"{name}  {fraction:4.0%}  {text}")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=1.0, doing="starting")
        yield lambda fraction, text: progress.update(task, completed=fraction, doing=text)
        progress.update(task, completed=1.0, doing="done")
