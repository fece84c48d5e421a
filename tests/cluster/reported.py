"""Builds what replicas report and control orders; run as a program, it is a run that will be killed.

python -m tests.cluster.reported JOURNAL     stores what `store_all` stores, says so, and waits for its end
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from laminar.cluster.payload import Payload
from laminar.control.messages import (
    Assignment,
    CommandId,
    Finished,
    GroupId,
    PromptId,
    ReplicaId,
    ReplicaReport,
    Score,
    Scored,
    ScoreTrajectories,
    TrainMiniBatch,
    TrajectoryId,
)
from laminar.data.prompt_pool import PromptPool
from laminar.data.records import Prompt, TokenDelta, WorkerReport

NUM_PROMPTS = 8
SEED = 11
LIFE_S = 60.0


def open_payload(journal: Path, *, seed: int = SEED) -> Payload:
    """Training prompt i is the token 100 + i, held-out prompt i the token 200 + i."""
    pools = [
        PromptPool([Prompt(PromptId(i), (first + i,), "sums", str(i), {}) for i in range(NUM_PROMPTS)])
        for first in (100, 200)
    ]
    return Payload(journal, *pools, seed)


def assignment(id: int, *, attempt: int = 0, num_tokens: int = 0) -> Assignment:
    return Assignment(TrajectoryId(id), attempt, GroupId(id // 4), PromptId(id // 4), num_tokens)


def delta(id: int, start: int, token_ids: Sequence[int], *, attempt: int = 0, version: int = 3) -> TokenDelta:
    logprobs = tuple(-token_id / 100 for token_id in token_ids)
    return TokenDelta(TrajectoryId(id), attempt, start, tuple(token_ids), logprobs, (1,) * len(token_ids), version)


def report(*tokens: TokenDelta, finished: Sequence[Finished] = ()) -> WorkerReport:
    return WorkerReport(ReplicaReport(ReplicaId(0), 0.5, 1, 0, 0, finished=tuple(finished)), tokens)


def finished(id: int, num_tokens: int, *, attempt: int = 0, truncated: bool = False) -> Finished:
    return Finished(TrajectoryId(id), attempt, num_tokens, truncated)


def score(payload: Payload, *ids: int, value: float = 1.0, attempt: int = 0, evaluation: bool = False) -> None:
    """What a reward worker's answer does."""
    command = ScoreTrajectories(CommandId(1), tuple(assignment(id, attempt=attempt) for id in ids), evaluation)
    payload.store_scores(command, Scored(command.id, tuple(Score(TrajectoryId(id), attempt, value) for id in ids)))


def order(*ids: int) -> TrainMiniBatch:
    trajectories = tuple(TrajectoryId(id) for id in ids)
    return TrainMiniBatch(CommandId(2), 1, 0, trajectories, tuple(GroupId(id // 4) for id in ids))


def store_all(payload: Payload) -> None:
    """0 is trained and forgotten; 1 is scored; 2 was moved once and is scored; 3 is finished; 4 is decoding."""
    payload.tasks([assignment(id) for id in range(5)], evaluation=False)
    payload.store(report(*(delta(id, 0, [10 + id, 20 + id]) for id in range(5)), finished=[finished(0, 2)]))
    payload.tasks([assignment(2, attempt=1, num_tokens=1)], evaluation=False)
    payload.store(report(delta(1, 2, [31]), finished=[finished(1, 3, truncated=True)]))
    payload.store(report(delta(2, 1, [42, 43], attempt=1), delta(3, 2, [33]), delta(4, 2, [34])))
    payload.store(report(finished=[finished(2, 3, attempt=1), finished(3, 3)]))
    score(payload, 0, 1, value=0.5)
    score(payload, 2, attempt=1)
    payload.forget([TrajectoryId(0)])


def main(journal: Path) -> None:
    payload = open_payload(journal)
    store_all(payload)
    print("stored", flush=True)
    time.sleep(LIFE_S)
    payload.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
