"""A damaged or lying file of a run directory is refused by its name, or what is read is right."""

import pytest

from tests.fuzz.bounded import check_surfaces
from tests.fuzz.run_files import SURFACES


def test_damaged_files_of_a_run_are_read_or_refused(tmp_path):
    check_surfaces(tmp_path, 0, 5, *SURFACES)


@pytest.mark.long
@pytest.mark.parametrize("surface", SURFACES)
def test_many_damaged_files_of_a_run_are_read_or_refused(tmp_path, surface):
    check_surfaces(tmp_path, 1000, 400, surface)
