"""Counts the turns of trajectories, and how often a tool answered, from their loss masks."""

from collections.abc import Sequence
from itertools import groupby

import torch

from laminar.data.records import Experience
from laminar.train.diagnostics import spread


def turn_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Names are verl's. A turn that a tool answered is a run of masked tokens, however many calls were in it."""
    runs = [[mask for mask, _ in groupby(experience.response.loss_mask)] for experience in experiences]
    num_turns = [max(1, run.count(1)) for run in runs]
    num_answers = [run.count(0) for run in runs]
    return {
        **spread("num_turns", torch.tensor(num_turns, dtype=torch.float64)),
        **spread("tool_call_counts", torch.tensor(num_answers, dtype=torch.float64)),
        "tool_call_counts/used_ratio": sum(number > 0 for number in num_answers) / len(num_answers),
    }
