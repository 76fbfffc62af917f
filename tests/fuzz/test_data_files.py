"""A damaged or lying file of data is read or refused in one line: no crash, no hang, no bomb."""

import pytest

from tests.fuzz.bounded import check_surfaces
from tests.fuzz.data_files import SURFACES


def test_damaged_files_are_read_or_refused(tmp_path):
    check_surfaces(tmp_path, 0, 24, *SURFACES)


@pytest.mark.long
@pytest.mark.parametrize("surface", SURFACES)
def test_many_damaged_files_are_read_or_refused(tmp_path, surface):
    check_surfaces(tmp_path, 1000, 1000, surface)
