"""Runs held-out evaluations: one closed batch on one replica, pinned to one version, beside training."""

from collections.abc import Iterator

from laminar.config import Config
from laminar.control import groups
from laminar.control.messages import AnyCommand, Assignment, Generate, PromptId
from laminar.control.state import ClusterState, Evaluation, Outcomes, Replica
from laminar.control.training import steps_done


def request(state: ClusterState, config: Config) -> None:
    """At a hand-over: is this version to be evaluated? The first and the last one always are."""
    interval, trainer = config.evaluation.interval_steps, state.trainer
    if interval is None or any(e.step == trainer.step for e in state.evaluations):
        return
    if not state.evaluations or trainer.step % interval == 0 or steps_done(state, config):
        state.evaluations.append(Evaluation(trainer.version, trainer.step))


def request_last(state: ClusterState, config: Config) -> None:
    """At the end of the data, when the last step was not known to be the last at its hand-over."""
    trainer = state.trainer
    if config.evaluation.interval_steps is not None and all(e.step != trainer.step for e in state.evaluations):
        state.evaluations.append(Evaluation(trainer.version, trainer.step))


def skip_lost(state: ClusterState) -> None:
    """Give up evaluations of a version that no relay and no replica holds any more (each relay has a newer one)."""
    relays = [relay for relay in state.relays.values() if relay.started]
    for evaluation in [e for e in state.evaluations if not e.dispatched]:
        version = evaluation.version
        on_relay = any(version in relay.complete for relay in relays)
        may_come = not relays or any(not relay.complete or relay.complete[-1] < version for relay in relays)
        if not (on_relay or may_come or any(r.version == version for r in state.replicas.values())):
            state.evaluations.remove(evaluation)
            state.counters.num_evaluations_skipped += 1


def due(state: ClusterState) -> Evaluation | None:
    """The oldest evaluation that no replica has taken and none is loading for."""
    return next((e for e in state.evaluations if not e.dispatched), None)


def start(
    state: ClusterState, config: Config, evaluation: Evaluation, replica: Replica, num_prompts: int, now: float
) -> Iterator[AnyCommand]:
    """Give the whole batch to this replica, which holds the evaluation's version."""
    evaluation.dispatched = True
    replica.evaluating = True
    assignments: list[Assignment] = []
    for prompt in range(min(num_prompts, config.evaluation.num_prompts_max)):
        group, members = groups.dispatch(
            state, PromptId(prompt), config.evaluation.num_responses_per_prompt, replica, now, evaluation=True
        )
        evaluation.groups[group.id] = Outcomes()
        assignments += members
    yield Generate(state.new_command(), replica.id, evaluation.version, tuple(assignments), evaluation=True)
