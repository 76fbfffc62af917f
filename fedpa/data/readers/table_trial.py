"""Reads a Parquet or Feather file in a process of its own: one that is damaged can crash Arrow.

Run as `python table_trial.py FILE BYTES`, with no more memory than BYTES and what Arrow itself
takes. Prints a JSON object: the `bytes` of the table's values, or the `error`.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

OWN = 2**32
"""Bytes of address space for Python and Arrow."""


def read_file(path: Path, use_threads: bool = True) -> Any:
    """A Parquet or Feather file as a pyarrow.Table."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(path, memory_map=True, use_threads=use_threads)
    from pyarrow import feather

    return feather.read_table(path, memory_map=True, use_threads=use_threads)


def measure(table: Any) -> int:
    """Bytes of the table's values, each counted in every row that has it."""
    return sum(max(_measure(column), len(column)) for column in table.columns)


def _measure(column: Any) -> int:
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        return sum(_measure_dictionary(chunk) for chunk in column.chunks)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        column = column.cast("large_binary")  # each row's bytes of its own
    if _has_shared_values(kind):
        raise ValueError(f"columns of type {kind} are not supported")
    return int(column.nbytes)


def _measure_dictionary(chunk: Any) -> int:
    from pyarrow import compute, types

    kind = chunk.dictionary.type
    if types.is_primitive(kind):
        return 8 * len(chunk)
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise ValueError(f"columns of type {chunk.type} are not supported")
    lengths = compute.binary_length(chunk.dictionary)
    return compute.sum(lengths.take(chunk.indices).cast("int64")).as_py() or 0


def _has_shared_values(kind: Any) -> bool:
    """Whether one stored value can be that of many rows, of the type or one that is in it."""
    from pyarrow import types

    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return True
    if types.is_run_end_encoded(kind):
        return True
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    shared = (types.is_dictionary, types.is_string_view, types.is_binary_view)
    return any(_has_shared_values(one) or any(is_it(one) for is_it in shared) for one in inner)


def main(path: str, limit: str) -> None:
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = OWN + Path(path).stat().st_size + 2 * int(limit)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    print(json.dumps(_try(Path(path), limit)))


def _try(path: Path, limit: str) -> dict[str, Any]:
    try:
        table = read_file(path, use_threads=False)
        table.validate(full=True)
        return {"bytes": measure(table)}
    except MemoryError:
        return {"error": f"it takes more than {limit} bytes"}
    except Exception as error:  # Arrow raises its own and Python's
        return {"error": str(error) or type(error).__name__}


if __name__ == "__main__":
    main(*sys.argv[1:])
