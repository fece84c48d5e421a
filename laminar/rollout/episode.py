"""Keeps the books of one trajectory: its turns, its tokens, its budget. Knows no engine, no clock, no tokenizer.

                request()            take(delta)               observe(token_ids)
    DECODING ──────────► engine ──────────────► TURN_ENDED ──────────────────────► DECODING
        ▲ request() again  │ abort                  │ None, or truncate(), or no turn left
        └─ INTERRUPTED ◄───┤                        ▼
                           ├─ length, stop ──► FINISHED        error ──► FAILED

A single-turn trajectory is one whose first turn is its last. Token ids are kept as they were sampled and are never
made from text again; what an environment observes is appended with loss mask 0 and log-prob 0.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import groupby

import msgspec

from laminar.control.messages import TrajectoryId
from laminar.data.records import Task, TokenDelta
from laminar.envs.env import Turn
from laminar.rollout.engines.engine import Delta, Request


class EpisodeRules(msgspec.Struct, frozen=True):
    """What all episodes of a closed batch have in common."""

    response_tokens_max: int
    """Tokens of a response, observations included."""
    stop_token_ids: tuple[int, ...]
    """Each ends a turn: the end of the sequence, and the environment's `turn_ends`."""
    num_turns_max: int = 1
    """1: single-turn, no environment is asked."""
    observation_tokens_max: int | None = None
    """None: only the response's budget limits an observation."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    evaluation: bool = False


class EpisodeState(StrEnum):
    DECODING = "decoding"
    TURN_ENDED = "turn_ended"
    """The environment is to be asked."""
    INTERRUPTED = "interrupted"
    """Aborted; request() goes on from its tokens."""
    FINISHED = "finished"
    FAILED = "failed"


class Episode:
    """One trajectory on one replica, from its prompt or, when it moved here, from its tokens so far.

    The turn that a resumed one is in follows from its tokens: every stop token that was sampled has ended a turn. If
    the last token is one, the environment had not answered yet, and is asked again.
    """

    def __init__(self, task: Task, rules: EpisodeRules, version: int) -> None:
        self._task = task
        self._rules = rules
        self._version = version
        self._token_ids = list(task.response_token_ids)
        self._loss_mask = list(task.loss_mask)
        # Log-probs and versions only of the tokens that came here; those before have been reported.
        self._num_resumed = self._num_reported = len(self._token_ids)
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._check_task()
        self._num_turns_ended = sum(map(self._ends_turn, self._token_ids, self._loss_mask))
        self.state = EpisodeState.DECODING
        self.truncated = False
        """Whether the length limit ended it."""
        self.cause = ""
        """Why it failed."""
        self.asked_before = False
        """Whether an earlier attempt may have asked the environment about the turn that has ended."""
        if self._token_ids and self._ends_turn(self._token_ids[-1], self._loss_mask[-1]):
            self._end_turn()
            self.asked_before = self.state is EpisodeState.TURN_ENDED
        elif self.num_tokens_left == 0:
            self._finish(truncated=True)

    @property
    def trajectory(self) -> TrajectoryId:
        return self._task.trajectory

    @property
    def attempt(self) -> int:
        return self._task.attempt

    @property
    def num_tokens(self) -> int:
        """Tokens of the response so far, observations included."""
        return len(self._token_ids)

    @property
    def num_tokens_left(self) -> int:
        """The rest of the budget, never negative."""
        return max(0, self._rules.response_tokens_max - len(self._token_ids))

    @property
    def num_observation_tokens_max(self) -> int:
        """Tokens that an observation may have: it must leave room for at least one of the next turn; never negative."""
        room = max(0, self.num_tokens_left - 1)
        limit = self._rules.observation_tokens_max
        return room if limit is None else min(room, limit)

    @property
    def num_turns(self) -> int:
        """Turns begun."""
        in_turn = not self._token_ids or not self._ends_turn(self._token_ids[-1], self._loss_mask[-1])
        return self._num_turns_ended + in_turn

    def request(self) -> Request:
        """What to submit now: everything so far, with what is left of the budget."""
        assert self.state in (EpisodeState.DECODING, EpisodeState.INTERRUPTED), f"{self._name} is {self.state}"
        self.state = EpisodeState.DECODING
        return Request(
            id=self._task.trajectory,
            token_ids=(*self._task.prompt.token_ids, *self._token_ids),
            num_new_tokens_max=self.num_tokens_left,
            position=len(self._token_ids),
            temperature=self._rules.temperature,
            top_p=self._rules.top_p,
            top_k=self._rules.top_k,
            seed=self._task.seed,
            stop_token_ids=self._rules.stop_token_ids,
            evaluation=self._rules.evaluation,
            may_continue=self._num_turns_ended + 1 < self._rules.num_turns_max,
        )

    def take(self, delta: Delta) -> None:
        """Take in what the engine decoded, the stop token included.

        Raises ValueError, naming trajectory and position, for tokens that break the engine's contract.
        """
        assert self.state is EpisodeState.DECODING, f"{self._name} is {self.state} and gets tokens"
        self._check_delta(delta)
        self._append(delta.token_ids, delta.logprobs, 1)
        match delta.stop_reason:
            case None:
                pass
            case "stop":
                self._num_turns_ended += 1
                self._end_turn()
            case "length":
                self._finish(truncated=True)
            case "abort":
                self.state = EpisodeState.INTERRUPTED
            case "error":
                self.fail(delta.cause)

    def turn(self, decode: Callable[[Sequence[int]], str]) -> Turn:
        """The turn that has just ended, for the environment."""
        assert self.state is EpisodeState.TURN_ENDED, f"{self._name} is {self.state}"
        prompt = self._task.prompt
        *earlier, text = map(decode, self._own_runs())
        return Turn(
            text=text,
            response_text=decode(self._token_ids),
            num_turns=self._num_turns_ended,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            earlier_turns=tuple(earlier),
        )

    def observe(self, token_ids: Sequence[int] | None) -> None:
        """The environment's answer, as tokens, at most `num_observation_tokens_max`; None: the trajectory is done."""
        assert self.state is EpisodeState.TURN_ENDED, f"{self._name} is {self.state}"
        if token_ids is None:
            self._finish(truncated=False)
            return
        if not token_ids:
            raise ValueError(f"{self._name}, turn {self._num_turns_ended}: an observation without tokens")
        num_tokens_max = self.num_observation_tokens_max
        assert len(token_ids) <= num_tokens_max, f"{self._name}: {len(token_ids)} tokens, {num_tokens_max} fit"
        self._append(token_ids, (0.0,) * len(token_ids), 0)
        self.state = EpisodeState.DECODING

    def truncate(self) -> None:
        """No observation fits any more: the length limit has ended it."""
        assert self.state is EpisodeState.TURN_ENDED, f"{self._name} is {self.state}"
        self._finish(truncated=True)

    def fail(self, cause: str) -> None:
        """The engine or the environment gave up on it."""
        self.state = EpisodeState.FAILED
        self.cause = cause

    def interrupt(self) -> None:
        """It has more to decode and is not to be submitted yet."""
        assert self.state is EpisodeState.DECODING, f"{self._name} is {self.state}"
        self.state = EpisodeState.INTERRUPTED

    def change_version(self, version: int) -> None:
        """Tokens from now on come from another version (only between an abort and the next request)."""
        assert self.state is not EpisodeState.DECODING, f"{self._name} is decoding"
        self._version = version

    def take_unreported(self) -> tuple[TokenDelta, ...]:
        """The tokens since the last call, one delta a version; none if there are no new ones."""
        deltas: list[TokenDelta] = []
        unreported = range(self._num_reported, len(self._token_ids))
        for version, positions in groupby(unreported, key=lambda p: self._versions[p - self._num_resumed]):
            run = list(positions)
            span, own = slice(run[0], run[-1] + 1), slice(run[0] - self._num_resumed, run[-1] + 1 - self._num_resumed)
            deltas.append(
                TokenDelta(
                    trajectory=self._task.trajectory,
                    attempt=self._task.attempt,
                    start=run[0],
                    token_ids=tuple(self._token_ids[span]),
                    logprobs=tuple(self._logprobs[own]),
                    loss_mask=tuple(self._loss_mask[span]),
                    version=version,
                )
            )
        self._num_reported = len(self._token_ids)
        return tuple(deltas)

    @property
    def _name(self) -> str:
        return f"trajectory {self._task.trajectory}, attempt {self._task.attempt}"

    def _ends_turn(self, token_id: int, mask: int) -> bool:
        return mask == 1 and token_id in self._rules.stop_token_ids

    def _own_runs(self) -> Iterator[list[int]]:
        """The tokens of each turn, without what was observed in between."""
        for mask, tokens in groupby(zip(self._token_ids, self._loss_mask, strict=True), key=lambda token: token[1]):
            if mask:
                yield [token_id for token_id, _ in tokens]

    def _end_turn(self) -> None:
        if self._num_turns_ended >= self._rules.num_turns_max:
            self._finish(truncated=False)
        else:
            self.state = EpisodeState.TURN_ENDED

    def _finish(self, *, truncated: bool) -> None:
        self.state = EpisodeState.FINISHED
        self.truncated = truncated

    def _append(self, token_ids: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        self._token_ids += token_ids
        self._logprobs += logprobs
        self._loss_mask += [mask] * len(token_ids)
        self._versions += [self._version] * len(token_ids)

    def _check_task(self) -> None:
        if len(self._token_ids) != len(self._loss_mask):
            raise ValueError(
                f"{self._name}: resumed with {len(self._token_ids)} tokens and {len(self._loss_mask)} mask entries"
            )

    def _check_delta(self, delta: Delta) -> None:
        where = f"{self._name}, position {len(self._token_ids)}"
        if delta.request != self._task.trajectory:
            raise ValueError(f"{where}: these tokens are of request {delta.request}")
        if len(delta.token_ids) != len(delta.logprobs):
            raise ValueError(f"{where}: {len(delta.token_ids)} tokens and {len(delta.logprobs)} log-probs")
        if len(delta.token_ids) > self.num_tokens_left:
            raise ValueError(f"{where}: {len(delta.token_ids)} tokens where {self.num_tokens_left} are left")
        if not all(map(math.isfinite, delta.logprobs)):
            raise ValueError(f"{where}: log-probs that are not finite: {delta.logprobs}")
        if delta.stop_reason == "stop" and (
            not delta.token_ids or delta.token_ids[-1] not in self._rules.stop_token_ids
        ):
            raise ValueError(f"{where}: stopped, and the last token is no stop token, so its end would be lost")
