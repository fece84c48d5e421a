"""Reads the rows of a parquet, json or jsonl file as they stand, each with its place for error messages."""

# pyarrow has no type information, so its names are unknown here, and here only.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

Place = str
"""Where a row is, as a user finds it: "row 3" (from 0) or "line 4" (from 1)."""
Row = dict[str, Any]

SUFFIXES = (".parquet", ".jsonl", ".json")
_ROWS_PER_BATCH = 1024


def read_rows(file: Path, columns: tuple[str, ...]) -> Iterator[tuple[Place, Row]]:
    """The rows of one file, streamed. Of a parquet file only `columns` are read, as far as it has them.

    Raises ValueError naming the file, and the row or line, for everything that is wrong with it.
    """
    if not file.is_file():
        raise ValueError(f"{file}: {'is a folder, not a file' if file.is_dir() else 'no such file'}")
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file}: the name must end in one of {', '.join(SUFFIXES)}")
    if file.stat().st_size == 0:
        raise ValueError(f"{file}: the file is empty")
    if file.suffix == ".parquet":
        yield from _read_parquet(file, columns)
    else:
        yield from _read_json(file)


def found_columns(file: Path, row: Row) -> list[str]:
    """Every column the file has, those that were not read included."""
    return sorted(pq.read_schema(file).names if file.suffix == ".parquet" else row)


def _read_parquet(file: Path, columns: tuple[str, ...]) -> Iterator[tuple[Place, Row]]:
    index = 0
    try:
        with pq.ParquetFile(file) as parquet:
            # pyarrow reads its own schema, never the one that a data-set library left in the metadata and that
            # another release of that library cannot parse.
            wanted = [name for name in columns if name in parquet.schema_arrow.names]
            for batch in parquet.iter_batches(batch_size=_ROWS_PER_BATCH, columns=wanted):
                for row in cast(list[Row], batch.to_pylist()):
                    yield f"row {index}", row
                    index += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a readable parquet file (stopped at row {index}): {error}") from error


def _read_json(file: Path) -> Iterator[tuple[Place, Row]]:
    """A list of objects, or one object a line: data-set libraries write both under either suffix."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error}") from error
    if text.lstrip().startswith("["):
        rows = cast(list[object], _parse(text, f"{file}"))
        for index, row in enumerate(rows):
            yield f"row {index}", _as_row(row, f"{file}, row {index}")
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{file}, line {number}"
            yield f"line {number}", _as_row(_parse(line, where), where)


def _parse(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error


def _as_row(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a row must be an object with columns, found {type(value).__name__}")
    return cast(Row, value)
