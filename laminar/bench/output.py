"""Prints what a benchmark measured."""

import json
from collections.abc import Mapping


def show(measured: Mapping[str, object], *, as_json: bool) -> None:
    """One JSON object, or a line for each value."""
    print(json.dumps(measured) if as_json else "\n".join(f"{name}: {value}" for name, value in measured.items()))
