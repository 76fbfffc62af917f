"""A damaged file is read or refused in one line: no crash, no hang, no other error."""

import os
import subprocess
import sys

import pytest

from tests.data.damaged import LAYOUTS


def check(directory, first, cases, *layouts):
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.damaged", directory, str(first), str(cases), *layouts],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (0, "done"), (lines[-1:], done.stderr[-2000:])
    assert not [line for line in lines if line.startswith("[")]


def test_damaged_files_are_read_or_refused(tmp_path):
    """In a process of its own, which may crash."""
    check(tmp_path, 0, 25, *LAYOUTS)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_damaged_files_are_read_or_refused(tmp_path, layout):
    check(tmp_path, 1000, 1000, layout)
