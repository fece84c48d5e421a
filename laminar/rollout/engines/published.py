"""Checks a published version against the model that is to serve it: its tensors before a load, its probe after."""

import math
from collections.abc import Mapping, Sequence

from laminar.relay.manifest import LeasedVersion, Probe, TensorEntry
from laminar.rollout.engines.engine import WrongWeights

ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of each dtype that a version may be published in."""
NUM_NAMES_SHOWN = 5

Shapes = Mapping[str, tuple[int, ...]]
"""The tensors that a model is made of, by their checkpoint names; tied ones once."""


def refuse_misfits(leased: LeasedVersion, shapes: Shapes, model_type: str) -> None:
    """WrongWeights, by name, if tensors are missing, unknown, repeated or not of their shape."""
    entries = {entry.name: entry for entry in leased.manifest.tensors}
    wrong = [
        f"{entry.name} ({reason})"
        for entry in leased.manifest.tensors
        if entry.name in shapes and (reason := _misfit(entry, shapes[entry.name], len(leased.data)))
    ]
    faults = {
        "missing": [name for name in shapes if name not in entries],
        "not of this model": [name for name in entries if name not in shapes],
        "wrong": wrong,
        "stated twice": [] if len(entries) == len(leased.manifest.tensors) else ["a tensor"],
    }
    told = [f"{fault}: {_enumerate(names)}" for fault, names in faults.items() if names]
    if told:
        raise WrongWeights(
            f"version {leased.manifest.version} does not fit the {model_type} of model.path; " + "; ".join(told)
        )


def check_probe(version: int, probe: Probe, logprobs: Sequence[float], *, tolerance: float) -> None:
    """Compare what an engine computed for the probe's tokens with what the publisher did.

    logprobs: of tokens 1.. given those before them, at temperature 1. Raises WrongWeights, by how much they differ.
    """
    assert len(logprobs) == len(probe.logprobs), (len(logprobs), len(probe.logprobs))
    differences = [abs(ours - theirs) for ours, theirs in zip(logprobs, probe.logprobs, strict=True)]
    # NaN would hide in a maximum, since it compares with nothing.
    difference = math.nan if any(map(math.isnan, differences)) else max(differences)
    if not difference <= tolerance:
        raise WrongWeights(
            f"version {version}: a probe log-prob differs from the publisher's by {difference:.3g}, "
            f"more than {tolerance:.3g}"
        )


def refuse_without_probe(version: int, probe: Probe) -> None:
    if len(probe.token_ids) < 2 or len(probe.logprobs) != len(probe.token_ids) - 1:
        raise WrongWeights(
            f"version {version} was published with {len(probe.token_ids)} probe tokens and {len(probe.logprobs)} "
            "log-probs, so what it serves cannot be checked; publish one log-prob for each token but the first"
        )


def _misfit(entry: TensorEntry, shape: tuple[int, ...], num_bytes: int) -> str:
    if entry.shape != shape:
        return f"shape {list(entry.shape)}, expected {list(shape)}"
    if entry.dtype not in ELEMENT_BYTES:
        return f"dtype {entry.dtype}, expected one of {', '.join(ELEMENT_BYTES)}"
    expected_bytes = math.prod(shape) * ELEMENT_BYTES[entry.dtype]
    if entry.num_bytes != expected_bytes or entry.offset + expected_bytes > num_bytes:
        return f"{entry.num_bytes} bytes at {entry.offset}, expected {expected_bytes} within {num_bytes}"
    return ""


def _enumerate(names: list[str]) -> str:
    shown = ", ".join(names[:NUM_NAMES_SHOWN])
    return shown if len(names) <= NUM_NAMES_SHOWN else f"{shown} and {len(names) - NUM_NAMES_SHOWN} more"
