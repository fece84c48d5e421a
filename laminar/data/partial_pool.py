"""Holds the responses so far of all unfinished and unforgotten trajectories, outside the replicas that make them.

replica ── TokenDelta(attempt, start, tokens) ──► apply: continues · repeats · overlaps · starts a new attempt
                                                         · late (ignored) · leaves a hole (error)
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

from laminar.control.messages import TrajectoryId
from laminar.data.records import Response, TokenDelta

NUM_FORGOTTEN_REMEMBERED = 200_000
"""Forgotten trajectories whose late tokens are still recognised; a lost replica's arrive within minutes."""


class Stored(msgspec.Struct):
    """A trajectory's response as `attempt`, the newest one, has made it."""

    attempt: int
    response: Response
    attempt_over: bool = False
    """Whether the trajectory has been taken from the replica that makes this attempt."""


class PartialResponsePool:
    """Responses by trajectory, grown by deltas that may be repeated, late or in pieces.

    A newer attempt goes on from `start` of its first delta: what earlier attempts had beyond is cut off, since the
    replica that resumed there never saw it.
    """

    def __init__(self) -> None:
        self._stored: dict[TrajectoryId, Stored] = {}
        self._forgotten: dict[TrajectoryId, None] = {}
        self.num_late = 0
        """Deltas ignored: of an older attempt, or of a forgotten trajectory."""
        self.num_repeated = 0
        """Deltas ignored: all their tokens were there already."""

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, trajectory: TrajectoryId) -> bool:
        return trajectory in self._stored

    def apply(self, delta: TokenDelta) -> bool:
        """Take a delta in; returns whether it changed anything. Applying one again changes nothing.

        Raises ValueError, naming trajectory and position, for a delta that leaves a hole, contradicts the tokens held,
        or is malformed.
        """
        _check_form(delta)
        if not delta.token_ids:
            return False
        stored = self._stored.get(delta.trajectory)
        if delta.trajectory in self._forgotten or (stored is not None and _is_late(delta, stored)):
            self.num_late += 1
            return False
        num_held = len(stored.response.token_ids) if stored is not None else 0
        if delta.start > num_held:
            raise ValueError(
                f"trajectory {delta.trajectory}, attempt {delta.attempt}: tokens {num_held} to {delta.start - 1} "
                f"never came, but those from {delta.start} on did"
            )
        if stored is None:
            stored = self._stored[delta.trajectory] = Stored(delta.attempt, Response())
        elif delta.attempt > stored.attempt:
            stored.attempt, stored.attempt_over = delta.attempt, False
            _truncate(stored.response, delta.start)
        return self._extend(stored.response, delta)

    def response(self, trajectory: TrajectoryId) -> Response:
        """Its response so far, empty before the first delta. Owned by the pool: copy it before changing it."""
        stored = self._stored.get(trajectory)
        return stored.response if stored is not None else Response()

    def num_tokens(self, trajectory: TrajectoryId) -> int:
        return len(self.response(trajectory).token_ids)

    def attempt(self, trajectory: TrajectoryId) -> int:
        """The newest attempt that sent tokens; 0 before the first."""
        stored = self._stored.get(trajectory)
        return stored.attempt if stored is not None else 0

    def trajectories(self) -> list[TrajectoryId]:
        return list(self._stored)

    def truncate_to(self, trajectory: TrajectoryId, num_tokens: int) -> None:
        """Cut its response to the tokens that control knows of: from these a new attempt goes on, or starts again.

        The attempt so far is over, even if nothing is cut: what it still sends is late. Raises ValueError if there are
        fewer tokens than that.
        """
        held = self.num_tokens(trajectory)
        if not 0 <= num_tokens <= held:
            raise ValueError(f"trajectory {trajectory} has {held} tokens, so it cannot be cut to {num_tokens}")
        if (stored := self._stored.get(trajectory)) is not None:
            stored.attempt_over = True
            _truncate(stored.response, num_tokens)

    def forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Drop these; tokens of theirs that still come are late. One that is not held is forgotten all the same."""
        for trajectory in trajectories:
            self._stored.pop(trajectory, None)
            self._forgotten[trajectory] = None
        num_surplus = len(self._forgotten) - NUM_FORGOTTEN_REMEMBERED
        for trajectory in list(islice(self._forgotten, max(0, num_surplus))):
            del self._forgotten[trajectory]

    def _extend(self, response: Response, delta: TokenDelta) -> bool:
        num_held = len(response.token_ids)
        num_known = min(num_held - delta.start, len(delta.token_ids))
        _check_agreement(response, delta, num_known)
        if num_known == len(delta.token_ids):
            self.num_repeated += 1
            return False
        response.token_ids.extend(delta.token_ids[num_known:])
        response.logprobs.extend(delta.logprobs[num_known:])
        response.loss_mask.extend(delta.loss_mask[num_known:])
        response.versions.extend([delta.version] * (len(delta.token_ids) - num_known))
        return True


def _check_form(delta: TokenDelta) -> None:
    num_tokens = len(delta.token_ids)
    if delta.start < 0 or len(delta.logprobs) != num_tokens or len(delta.loss_mask) != num_tokens:
        raise ValueError(
            f"trajectory {delta.trajectory}: a delta from {delta.start} with {num_tokens} tokens, "
            f"{len(delta.logprobs)} log-probs and {len(delta.loss_mask)} mask entries"
        )


def _is_late(delta: TokenDelta, stored: Stored) -> bool:
    return delta.attempt < stored.attempt or (delta.attempt == stored.attempt and stored.attempt_over)


def _check_agreement(response: Response, delta: TokenDelta, num_known: int) -> None:
    """The tokens that are held already must be the same: one attempt samples a position once."""
    span = slice(delta.start, delta.start + num_known)
    held: tuple[tuple[str, Sequence[object], Sequence[object]], ...] = (
        ("token", response.token_ids[span], delta.token_ids),
        ("log-prob", response.logprobs[span], delta.logprobs),
        ("loss mask", response.loss_mask[span], delta.loss_mask),
        ("version", response.versions[span], (delta.version,) * num_known),
    )
    for what, old, new in held:
        for offset in range(num_known):
            if old[offset] != new[offset]:
                raise ValueError(
                    f"trajectory {delta.trajectory}, attempt {delta.attempt}, position {delta.start + offset}: "
                    f"{what} {new[offset]} contradicts {old[offset]}, which came before"
                )


def _truncate(response: Response, num_tokens: int) -> None:
    del response.token_ids[num_tokens:]
    del response.logprobs[num_tokens:]
    del response.loss_mask[num_tokens:]
    del response.versions[num_tokens:]
