"""Asks for the rewards of finished trajectories, and takes them in."""

from collections.abc import Iterator, Sequence

from laminar.config import Config
from laminar.control import groups
from laminar.control.messages import AnyCommand, Failed, Score, Scored, ScoreTrajectories
from laminar.control.state import Awaited, ClusterState
from laminar.control.trajectory_state import Trajectory, TrajectoryState

START_UP_S = 60.0
"""What a reward worker may take to start, on top of its calls."""


def ask(state: ClusterState, config: Config, finished: Sequence[Trajectory], now: float) -> Iterator[AnyCommand]:
    """One command for the training ones and one for the held-out ones among them."""
    for evaluation in (False, True):
        chosen = [t for t in finished if t.evaluation == evaluation]
        if chosen:
            # Whatever was asked for before comes first.
            state.num_scores_awaited += len(chosen)
            num_rounds = -(-state.num_scores_awaited // config.reward.num_workers)
            id = state.expect(
                Awaited.SCORES,
                now,
                START_UP_S + config.reward.timeout_s * num_rounds,
                trajectories=tuple(t.id for t in chosen),
            )
            yield ScoreTrajectories(id, tuple(groups.assignment(t) for t in chosen), evaluation)


def take_in(state: ClusterState, config: Config, event: Scored, now: float) -> Iterator[AnyCommand]:
    if (pending := state.pending.pop(event.command, None)) is not None:
        state.num_scores_awaited -= len(pending.trajectories)
    for score in event.scores:
        if trajectory := _awaiting(state, score):
            yield from groups.score(state, config, trajectory, score.score)
    failed = [(t, f.cause) for f in event.failed if (t := _awaiting(state, f))]
    yield from fail(state, config, failed, now)


def _awaiting(state: ClusterState, message: Score | Failed) -> Trajectory | None:
    trajectory = state.trajectories.get(message.trajectory)
    if trajectory is None or trajectory.attempt != message.attempt or trajectory.state is not TrajectoryState.FINISHED:
        state.counters.num_late_messages += 1
        return None
    return trajectory


def fail(
    state: ClusterState, config: Config, failed: Sequence[tuple[Trajectory, str]], now: float
) -> Iterator[AnyCommand]:
    """A reward that failed is asked for once more; then the trajectory is dropped by name, never scored zero."""
    again: list[Trajectory] = []
    for trajectory, cause in failed:
        trajectory.num_failures += 1
        if trajectory.num_failures > groups.NUM_FAILURES_MAX:
            yield from groups.drop(state, config, trajectory, cause)
        else:
            state.counters.num_trajectories_retried += 1
            again.append(trajectory)
    yield from ask(state, config, again, now)
