"""Which older versions are sent to which machine, and which are not."""

from laminar.control import fetch
from laminar.control.messages import Fetch, GroupId, MachineId, PromptId, ReplicaId, TrajectoryId
from laminar.control.relay_state import Relay
from laminar.control.state import Awaited, ClusterState, Replica
from laminar.control.trajectory_state import Segment, Trajectory, TrajectoryState
from tests.control.fake_world import FakeWorld, make_config, make_plane

NEWEST = 7
CONFIG = make_config()


def state_with(held: dict[int, list[int]], retained: tuple[int, ...]) -> ClusterState:
    state = ClusterState(retained=retained)
    state.trainer.version = NEWEST
    for machine, versions in held.items():
        relay = Relay(MachineId(machine), heard_at_s=0.0, started=True, complete=versions)
        state.relays[relay.machine] = relay
    return state


def ordered(state: ClusterState, now: float = 100.0) -> list[tuple[int, int, int]]:
    commands = list(fetch.order(state, CONFIG, now))
    assert all(isinstance(command, Fetch) for command in commands)
    return [(c.version, c.source, c.machine) for c in commands if isinstance(c, Fetch)]


def make_homeless(state: ClusterState, version: int) -> None:
    trajectory = Trajectory(
        TrajectoryId(1),
        GroupId(0),
        PromptId(0),
        evaluation=False,
        state=TrajectoryState.MOVING,
        replica=None,
        target=None,
        dispatched_at_s=0.0,
        segments=[Segment(0, version)],
        num_tokens=5,
    )
    state.trajectories[trajectory.id] = trajectory
    state.homeless[trajectory.id] = None


def add_replica(state: ClusterState, id: int, *, machine: int, version: int) -> None:
    replica = Replica(ReplicaId(id), MachineId(machine), 0.0, started=True, version=version)
    state.replicas[replica.id] = replica
    state.index.update(replica)


def test_a_version_that_is_needed_and_on_one_machine_only_goes_to_a_second():
    state = state_with({0: [4, 7], 1: [7], 2: [7]}, (4, 7))
    assert ordered(state) == [(4, 0, 1)]
    assert ordered(state) == [], "it is on its way"


def test_two_copies_are_enough():
    assert ordered(state_with({0: [4, 7], 1: [4, 7], 2: [7]}, (4,))) == []


def test_the_newest_comes_down_the_chain_and_a_lost_version_from_nowhere():
    assert ordered(state_with({0: [7], 1: [], 2: []}, (4, 7))) == []


def test_a_copy_never_pushes_out_what_is_needed_as_well():
    """Four places: the newest, two that are needed, and one for what arrives next."""
    state = state_with({0: [4, 5, 6, 7], 1: [5, 6, 7]}, (4, 5, 6))
    assert ordered(state) == []


def test_it_is_fetched_to_where_an_empty_replica_could_take_up_homeless_trajectories():
    state = state_with({0: [4, 7], 1: [4, 7], 2: [7]}, (4,))
    make_homeless(state, 4)
    add_replica(state, 0, machine=2, version=7)
    assert ordered(state) == [(4, 0, 2)]


def test_no_fetch_where_a_replica_serves_it_or_could_load_it_at_home():
    state = state_with({0: [4, 7], 1: [4, 7], 2: [7]}, (4,))
    make_homeless(state, 4)
    add_replica(state, 0, machine=2, version=7)
    add_replica(state, 1, machine=1, version=7)
    assert ordered(state) == []
    state.replicas[ReplicaId(1)].machine, state.replicas[ReplicaId(1)].version = MachineId(2), 4
    assert ordered(state) == []


def test_after_a_failure_it_is_asked_for_again_and_not_at_once():
    state = state_with({0: [4, 7], 1: [7]}, (4,))
    assert ordered(state, 100.0) == [(4, 0, 1)]
    state.pending.clear()
    fetch.fail(state, 100.5)
    assert ordered(state, 101.0) == []
    assert ordered(state, 101.6) == [(4, 0, 1)]


def test_a_lost_relay_s_fetch_is_forgotten():
    state = state_with({0: [4, 7], 1: [7], 2: [7]}, (4,))
    assert ordered(state) == [(4, 0, 1)]
    fetch.forget(state, MachineId(1))
    del state.relays[MachineId(1)]
    assert ordered(state) == [(4, 0, 2)]


def test_in_a_run_a_machine_that_comes_back_gets_the_versions_that_live_trajectories_need():
    """The second copy was lost with its relay: it is fetched, and the loss of the first then restarts nobody."""
    world = FakeWorld(config := make_config(num_replicas=4, num_machines=2), seed=5)
    control = make_plane(config)
    world.kill_relay(1, 3.0)
    world.run(control)
    fetched = [command for _, command in world.commands if isinstance(command, Fetch)]
    assert fetched and {int(command.machine) for command in fetched} == {1}
    assert control.state.counters.num_versions_fetched == len({(c.machine, c.version) for c in fetched})
    assert not any(pending.awaited is Awaited.FETCH for pending in control.state.pending.values())
    assert control.state.counters.num_trajectories_restarted == 0
