"""Reads mutated files in this process, whose memory and time are bounded.

`python -m tests.fuzz.bounded DIRECTORY FIRST CASES SURFACE…` prints a JSON line for each case that
is neither read nor refused in one line that names the file, that writes outside its directory, or
that is read as other data than the file has a digest of. A case that hangs or crashes ends the
process, after its name was printed. The last line counts, by surface: refused, read.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedpa.errors import FedpaError

SECONDS, MEMORY = 20, 2**31
"""Bounds of a case: seconds of this process, and bytes of addresses besides the libraries'."""
PATIENCE = 600
"""Seconds of a case on a machine that does other things, too."""


class Surface(NamedTuple):
    """A reader, and the file that is mutated for it."""

    name: str
    """The file's, below a directory that `make` fills."""
    make: Callable[[Path], None]
    """Writes the file at a path."""
    read: Callable[[Path], Any]
    """Reads it and uses what it has; raises AssertionError if that is not right data."""
    mutate: Callable[[Path, bytes, random.Random], None]
    """(path, its right content, generator) → nothing; changes the file."""
    share: int = 1
    """One in so many of the cases is run: of slow ones, fewer."""
    named: str = ""
    """What a refusal has to name, if it is not the file itself."""


def read_mutated(surface, path):
    """(whether it was refused, what is wrong with the outcome if anything is)."""
    try:
        surface.read(path)
    except FedpaError as error:
        named = surface.named or path.name
        known = str(error).isprintable() and named in str(error)
        return True, None if known else f"says {str(error)!r}, which does not name {named}"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return False, f"{error!r:.300} at {last.filename}:{last.lineno}"
    return False, None


def list_tree(directory, home):
    """What is in the directory but not below `home`, with sizes."""
    found = {}
    for root, names, files in os.walk(directory):
        if Path(root) == home:
            names.clear()
            continue
        found |= {
            os.path.join(root, name): os.lstat(os.path.join(root, name)).st_size for name in files
        }
        found |= dict.fromkeys((os.path.join(root, name) for name in names), -1)
    return found


def run_cases(directory, surface, label, first, cases):
    """Print what is wrong; return how many were refused and read."""
    home = Path(directory) / label
    path = home / surface.name
    path.parent.mkdir(parents=True)
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    surface.make(path)
    content = path.read_bytes()
    assert read_mutated(surface, path) == (False, None), read_mutated(surface, path)
    outside, count = list_tree(directory, home), [0, 0]
    for case in range(first, first + max(cases // surface.share, 1)):
        print(label, case, flush=True)
        path.write_bytes(content)
        surface.mutate(path, content, random.Random(f"{label} {case}"))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(PATIENCE)
        refused, wrong = read_mutated(surface, path)
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if list_tree(directory, home) != outside:
            wrong = "wrote outside its directory"
        if wrong:
            print(json.dumps([label, case, wrong]), flush=True)
        count[not refused] += 1
        shutil.rmtree(home / "cache", ignore_errors=True)
    return count


def check_surfaces(directory, first, cases, *labels):
    """Run the cases in a process of its own, which may crash; print how many were refused."""
    words = [directory, first, cases, *labels]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.bounded", *map(str, words)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    last = lines[-1] if lines else ""
    assert (done.returncode, last[:4]) == (0, "done"), (last, done.stderr[-2000:])
    assert not [line for line in lines if line.startswith("[")]
    counts = json.loads(last.removeprefix("done")).values()
    refused, read = map(sum, zip(*counts, strict=True))
    print(f"\n{refused + read:,} mutated files: {refused:,} refused, {read:,} read as right data")


def main(directory, first, cases, *labels):
    from tests.fuzz import data_files, run_files

    surfaces = data_files.SURFACES | run_files.SURFACES
    for label in labels:
        if label in run_files.SURFACES:
            run_files.make_run()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*(it is skipped|is used|is left out)")
    counts = {
        label: run_cases(directory, surfaces[label], label, int(first), int(cases))
        for label in labels
    }
    print("done", json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
