"""Defines the payload records that the pools hold and the processes exchange."""

from typing import Any

import msgspec

from laminar.control.messages import (
    GroupId,
    Loaded,
    LoadFailed,
    MachineId,
    PromptId,
    Released,
    ReplicaReport,
    TrajectoryId,
)


class Problem(msgspec.Struct, frozen=True):
    """One row of a data set, as the file has it; `prompt` is chat messages or plain text."""

    prompt: list[dict[str, str]] | str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


class Prompt(msgspec.Struct, frozen=True):
    """One row of a data set, tokenised once.

    data_source, ground_truth and extra_info are passed to the reward function as the file has them.
    """

    id: PromptId
    token_ids: tuple[int, ...]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


class Response(msgspec.Struct):
    """The tokens of one trajectory after its prompt, all lists of the same length [num_tokens].

    logprobs: behaviour log-probs as sampled, nats; 0 where loss_mask is 0 (tool output). versions: the weight version
    that each token was sampled under.
    """

    token_ids: list[int] = []
    logprobs: list[float] = []
    loss_mask: list[int] = []
    versions: list[int] = []


class TokenDelta(msgspec.Struct, frozen=True):
    """Tokens `start`, start + 1, … of a trajectory's response, as a replica reported them."""

    trajectory: TrajectoryId
    attempt: int
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    version: int


class KvParcel(msgspec.Struct, frozen=True):
    """The KV cache of a trajectory that was released, left in memory of its machine for whoever goes on with it there.

    It is of the first `num_tokens` tokens, prompt included, under `version`. path: where other processes of this user
    on that machine can open the memory; it is gone after a while, or with the replica that left it. checksum: xxh3_64
    of the bytes.
    """

    trajectory: TrajectoryId
    machine: MachineId
    version: int
    num_tokens: int
    path: str
    offset: int
    num_bytes: int
    checksum: int


class WorkerReport(msgspec.Struct, frozen=True):
    """A replica's event with the tokens that it speaks of: the tokens are stored first, then the event is handled."""

    event: ReplicaReport | Released | Loaded | LoadFailed
    tokens: tuple[TokenDelta, ...]
    kv: tuple[KvParcel, ...] = ()


class Task(msgspec.Struct, frozen=True):
    """A trajectory as a replica receives it: the prompt, and the response so far when it is resumed."""

    trajectory: TrajectoryId
    attempt: int
    prompt: Prompt
    response_token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    seed: int
    kv: KvParcel | None = None


class ScoringTask(msgspec.Struct, frozen=True):
    """A finished response as a reward worker receives it, which turns its ids into text."""

    trajectory: TrajectoryId
    attempt: int
    response_token_ids: tuple[int, ...]
    prompt: Prompt


class Experience(msgspec.Struct, frozen=True):
    """A finished, scored trajectory as the trainer receives it."""

    trajectory: TrajectoryId
    group: GroupId
    prompt_token_ids: tuple[int, ...]
    response: Response
    score: float
    version: int
    truncated: bool
