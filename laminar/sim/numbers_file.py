"""Reads a user's own list of numbers: one a line, or a JSON list; an error names the file, the line and the fix."""

import json
import math
from collections.abc import Iterator
from pathlib import Path


def read_numbers(path: Path, *, what: str, whole: bool) -> list[float]:
    """All numbers of a file, which are positive. what: what one of them is, for the message; whole: integers only.

    Raises ValueError for a file that is not there or holds anything else, or nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}; name a file with one {what} a line") from error
    values = _in_json(path, text) if path.suffix == ".json" else _in_lines(text)
    numbers = [_checked(path, line, value, what, whole=whole) for line, value in values]
    if not numbers:
        raise ValueError(f"{path} is empty; write one {what} a line")
    return numbers


def _in_lines(text: str) -> Iterator[tuple[int, object]]:
    for line, content in enumerate(text.splitlines(), start=1):
        if content.strip():
            try:
                yield line, float(content)
            except ValueError:
                yield line, content.strip()


def _in_json(path: Path, text: str) -> Iterator[tuple[int, object]]:
    """Element by element, so that the line of each is known."""
    decoder = json.JSONDecoder()
    position = _skip(text, 0)
    if text[position : position + 1] != "[":
        raise ValueError(f"{path}, line {_line(text, position)}: not a JSON list; write [512, 1024, …]")
    position = _skip(text, position + 1)
    while text[position : position + 1] != "]":
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg}); write [512, 1024, …]") from error
        yield _line(text, position), value
        position = _skip(text, end)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _checked(path: Path, line: int, value: object, what: str, *, whole: bool) -> float:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value <= 0
        or (whole and value != int(value))
    ):
        kind = "a whole number of 1 or more" if whole else "a number above 0"
        raise ValueError(f"{path}, line {line}: {value!r} is no {what}; put {kind} there, or remove it")
    return float(value)
