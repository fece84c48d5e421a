"""Lays trajectories out in micro-batches of similar length, each within a budget of padded tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laminar.data.records import Experience

FILLER = 0
"""Token id right of a row's end. Attention is causal, so no real token sees it, and no mask is looked up by id:
a tokenizer whose padding is its stop token changes nothing."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Trajectories of one forward-backward, padded on the right, and where in them the trained tokens are."""

    token_ids: Tensor
    """[num_rows, longest]: prompt, response, filler."""
    predictors: Tensor
    """[num_tokens]: index into the flattened [num_rows * longest] positions; each is one before its target."""
    targets: Tensor
    """[num_tokens]: the trained token ids."""
    behaviour_logprobs: Tensor
    """[num_tokens]"""
    rows: Tensor
    """[num_tokens]: index of the token's trajectory among the experiences that the micro-batches were planned for."""


def plan_micro_batches(lengths: Sequence[int], padded_tokens_max: int) -> list[list[int]]:
    """Cut rows, shortest first, so that rows times longest stays within the budget; returns indices.

    A row that is longer than the budget on its own gets a micro-batch of its own.
    """
    plan: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if plan and lengths[index] * (len(plan[-1]) + 1) <= padded_tokens_max:
            plan[-1].append(index)
        else:
            plan.append([index])
    return plan


def lay_out(experiences: Sequence[Experience], indices: Sequence[int]) -> MicroBatch:
    """Pad `experiences[i] for i in indices` and find their trained tokens by loss_mask, never by token id.

    Without indices it is one row of filler with nothing to train: the forward pass of a rank that only keeps step.
    """
    longest = max((num_tokens(experiences[index]) for index in indices), default=0)
    token_ids: list[list[int]] = [] if indices else [[FILLER]]
    predictors: list[int] = []
    targets: list[int] = []
    behaviour_logprobs: list[float] = []
    rows: list[int] = []
    for row, index in enumerate(indices):
        experience = experiences[index]
        response = experience.response
        if not experience.prompt_token_ids:
            raise ValueError(
                f"trajectory {experience.trajectory} has an empty prompt: nothing predicts its first token"
            )
        used = [*experience.prompt_token_ids, *response.token_ids]
        token_ids.append(used + [FILLER] * (longest - len(used)))
        first_predictor = row * longest + len(experience.prompt_token_ids) - 1
        trained = [k for k, mask in enumerate(response.loss_mask) if mask]
        predictors += [first_predictor + k for k in trained]
        targets += [response.token_ids[k] for k in trained]
        behaviour_logprobs += [response.logprobs[k] for k in trained]
        rows += [index] * len(trained)
    return MicroBatch(
        token_ids=torch.tensor(token_ids),
        predictors=torch.tensor(predictors, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        behaviour_logprobs=torch.tensor(behaviour_logprobs),
        rows=torch.tensor(rows, dtype=torch.long),
    )


def num_tokens(experience: Experience) -> int:
    """Tokens of prompt and response, tool output included."""
    return len(experience.prompt_token_ids) + len(experience.response.token_ids)


def num_trained_tokens(experience: Experience) -> int:
    """Response tokens that the policy sampled (loss_mask 1)."""
    return sum(experience.response.loss_mask)
