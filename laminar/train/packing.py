"""Lays trajectories out in micro-batches: end to end, those of similar length together, within a budget of tokens.

prompt response | prompt response | …       one row, no padding
0 1 2 3 4 5 6 7 | 0 1 2 3 4 5 6 …           positions start again with each trajectory
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laminar.data.records import Experience
from laminar.train.packed_attention import Runs, runs_of

FILLER = 0
"""Any token will do where nothing is trained."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole trajectories of one forward-backward, and where in them the trained tokens are."""

    token_ids: Tensor
    """[1, num_tokens]: prompt and response of each trajectory, nothing in between."""
    position_ids: Tensor
    """[1, num_tokens]: a token's position in its trajectory."""
    runs: Runs
    """Where trajectories begin and end, as attention needs it."""
    predictors: Tensor
    """[num_trained_tokens]: index into num_tokens; each is one before its target."""
    targets: Tensor
    """[num_trained_tokens]: the trained token ids."""
    behaviour_logprobs: Tensor
    """[num_trained_tokens]"""
    rows: Tensor
    """[num_trained_tokens]: index of the token's trajectory among the experiences that the micro-batches were planned
    for."""


def plan_micro_batches(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Cut the trajectories, shortest first, into micro-batches of at most so many tokens; returns indices.

    One that is longer than the budget on its own gets a micro-batch of its own.
    """
    plan: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if plan and lengths[index] <= room:
            plan[-1].append(index)
        else:
            plan.append([index])
            room = tokens_max
        room -= lengths[index]
    return plan


def lay_out(experiences: Sequence[Experience], indices: Sequence[int]) -> MicroBatch:
    """Lay `experiences[i] for i in indices` end to end; their trained tokens are found by loss_mask, never by id.

    Without indices it is a single token with nothing to train: the passes of a rank that only keeps step.
    """
    token_ids: list[int] = [] if indices else [FILLER]
    position_ids: list[int] = [] if indices else [0]
    lengths: list[int] = [] if indices else [1]
    predictors: list[int] = []
    targets: list[int] = []
    behaviour_logprobs: list[float] = []
    rows: list[int] = []
    for index in indices:
        experience = experiences[index]
        response = experience.response
        if not experience.prompt_token_ids:
            raise ValueError(
                f"trajectory {experience.trajectory} has an empty prompt: nothing predicts its first token"
            )
        first_predictor = len(token_ids) + len(experience.prompt_token_ids) - 1
        trained = [k for k, mask in enumerate(response.loss_mask) if mask]
        predictors += [first_predictor + k for k in trained]
        targets += [response.token_ids[k] for k in trained]
        behaviour_logprobs += [response.logprobs[k] for k in trained]
        rows += [index] * len(trained)
        lengths.append(num_tokens(experience))
        token_ids += [*experience.prompt_token_ids, *response.token_ids]
        position_ids += range(lengths[-1])
    return MicroBatch(
        token_ids=torch.tensor([token_ids]),
        position_ids=torch.tensor([position_ids]),
        runs=runs_of(lengths),
        predictors=torch.tensor(predictors, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        behaviour_logprobs=torch.tensor(behaviour_logprobs),
        rows=torch.tensor(rows, dtype=torch.long),
    )


def lay_out_text(token_ids: Sequence[int]) -> MicroBatch:
    """A single text, all of whose tokens but the first are asked about."""
    num_asked = len(token_ids) - 1
    return MicroBatch(
        token_ids=torch.tensor([token_ids]),
        position_ids=torch.arange(len(token_ids))[None],
        runs=runs_of([len(token_ids)]),
        predictors=torch.arange(num_asked),
        targets=torch.tensor(token_ids[1:]),
        behaviour_logprobs=torch.zeros(num_asked),
        rows=torch.zeros(num_asked, dtype=torch.long),
    )


def num_tokens(experience: Experience) -> int:
    """Tokens of prompt and response, tool output included."""
    return len(experience.prompt_token_ids) + len(experience.response.token_ids)


def num_trained_tokens(experience: Experience) -> int:
    """Response tokens that the policy sampled (loss_mask 1)."""
    return sum(experience.response.loss_mask)
