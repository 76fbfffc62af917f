"""The test suite; `typecheck` is named in pyproject.toml."""

from tests import typecheck as typecheck
