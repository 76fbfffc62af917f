"""What the commands import before they have something to compute, and without the laboratory."""

import subprocess
import sys

import pytest

from fedpa.__main__ import EXTRA
from fedpa.experiments.cli import commands

HEAVY = ("jax", "equinox", "optax", "optuna", "matplotlib", "plotly", "h5py", "sklearn")
LABORATORY = ("matplotlib", "plotly", "optuna", "h5py", "sklearn", "orbax", "tensorboardX")
COMMAND = """
import sys
from fedpa.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit as end:  # of help
    if end.code:
        raise
print("imported:", *sys.modules)
if sys.platform == "linux":
    print("kilobytes:", open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


def run(code, *words):
    """A process of its own."""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


LIGHT = [
    "--help",
    "methods",
    "tasks",
    *(
        f"{name} {word}"
        for name in ("run", "compare", "sweep")
        for word in ("--help", "--help-all")
    ),
    "help run",
]


@pytest.mark.parametrize("words", LIGHT)
def test_lists_and_help_import_nothing_heavy(words):
    child = run(COMMAND, *words.split())
    assert child.returncode == 0, child.stderr
    said = child.stdout.splitlines()
    found = {line.split(":")[0]: line.split()[1:] for line in said[-2:] if ":" in line}
    assert not {name.split(".")[0] for name in found["imported"]} & set(HEAVY)
    if sys.platform == "linux":
        assert int(found["kilobytes"][0]) < 80_000


def test_the_library_imports_nothing_of_the_laboratory():
    child = run("import sys, fedpa; fedpa.fit; print(*sys.modules)")
    assert child.returncode == 0, child.stderr
    assert not {name.split(".")[0] for name in child.stdout.split()} & set(LABORATORY)


def test_readers_need_only_their_own_packages():
    code = "import sys\nsys.modules['h5py'] = None\nfrom fedpa.data.readers import open_npz"
    child = run(code)
    assert child.returncode == 0, child.stderr


WITHOUT = f"import sys\nsys.modules.update(dict.fromkeys({EXTRA!r}))\n"


@pytest.mark.parametrize("words", [["compare", "digits"], ["sweep", "digits"], ["report", "a"]])
def test_missing_packages_are_one_line_that_says_what_installs_them(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    child = run(WITHOUT + COMMAND, *words)
    assert child.returncode == 2
    assert len(child.stderr.splitlines()) == 1
    assert "pip install 'fedpa[experiments]'" in child.stderr


def test_a_comparison_in_code_says_what_installs_them():
    child = run(WITHOUT + "import fedpa\nfedpa.fit\nfedpa.compare")
    assert child.returncode == 1
    last = child.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: filelock is not installed")
    assert "pip install 'fedpa[experiments]'" in last


@pytest.mark.parametrize(
    "words", [["--help"], ["methods"], ["data", "list"], ["run", "digits", "--help"]]
)
def test_commands_that_need_none_of_them_work_without(words):
    child = run(WITHOUT + COMMAND, *words)
    assert child.returncode == 0, child.stderr


def test_every_command_has_its_function_and_every_file_a_command():
    from importlib import import_module
    from pkgutil import iter_modules

    found = [*commands.COMMANDS.values(), *commands.DATA.values()]
    places = [command.function.split(".") for command in found if not command.commands]
    assert {file for file, _ in places} == {info.name for info in iter_modules(commands.__path__)}
    for file, function in places:
        assert callable(getattr(import_module(f"{commands.__name__}.{file}"), function))


COMPUTES = """
import sys, fedpa
fedpa.configure = lambda: sys.exit(7)
from fedpa.__main__ import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_commands_that_compute_set_jax_up_first(name):
    child = run(COMPUTES, name, "--no-such-option")  # refused once the command reads it
    assert child.returncode == (7 if commands.COMMANDS[name].computes else 2), child.stderr
