"""A run that is killed at any moment goes on from its log: each prompt is trained exactly once an epoch."""

from collections import Counter

import msgspec
import pytest

from laminar.config import ScheduleConfig
from laminar.control.recovery import recover
from laminar.control.state import ClusterState
from laminar.control.trajectory_state import TrajectoryState
from tests.control.fake_world import FakeWorld, make_config, make_plane
from tests.control.test_plane import SCHEDULES, groups_trained, prompts_dispatched

NUM_PROMPTS = 44


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
@pytest.mark.parametrize("num_events", [1, 60, 200, 333, 450, 700])
def test_a_killed_run_goes_on_where_its_log_ends(schedule: ScheduleConfig, num_events: int):
    config = make_config(schedule=schedule, num_steps=None)
    first, control = FakeWorld(config, seed=0), make_plane(config, num_prompts=NUM_PROMPTS)
    for count, (now, event) in enumerate(first.events()):
        if count == num_events:
            break
        for command in control.handle(event, now):
            first.execute(command)
    step = control.state.trainer.saved_step
    state = msgspec.json.decode(msgspec.json.encode(control.state), type=ClusterState)
    finished = {t.id for t in state.trajectories.values() if t.state is TrajectoryState.FINISHED and not t.evaluation}

    recover(state, step=step)
    state.check()
    second = FakeWorld(config, seed=1, step=step)
    again = make_plane(config, num_prompts=NUM_PROMPTS, state=state)
    second.run(again)

    assert again.state.trainer.step == -(-NUM_PROMPTS // 8)
    assert again.state.ledger.dispatched == again.state.ledger.trained == NUM_PROMPTS * 4
    assert prompts_dispatched(first) | prompts_dispatched(second) == Counter(dict.fromkeys(range(NUM_PROMPTS), 1))
    surviving = groups_trained(first)[: 8 * step] + groups_trained(second)
    assert sorted(surviving) == sorted(set(surviving)), "a group was trained twice in the surviving history"
    assert len(surviving) == NUM_PROMPTS
    resumed = {
        a.trajectory
        for _, c in second.commands
        if hasattr(c, "version") and hasattr(c, "trajectories")
        for a in c.trajectories
    }
    assert not finished & resumed, "a finished response was generated again"


def test_versions_go_on_counting_after_a_restart():
    config = make_config(num_steps=4)
    first, control = FakeWorld(config, seed=0), make_plane(config)
    first.run(control)
    state = control.state
    newest = state.trainer.version
    recover(state, step=2)
    assert state.trainer.version == newest
    assert state.trainer.step == 2
