"""Who is passed by when a broadcast stands still, who is not, and what the chain looks like then."""

from collections.abc import Iterable

import pytest

from laminar.control import broadcast
from laminar.control.messages import AnyCommand, MachineId, RelayReport, SenderReport, SetChain, VersionComplete
from laminar.control.state import ClusterState

VERSION = 3
TICK_S = 0.1


class Broadcast:
    """A chain in mid-broadcast, told of at every tick: how much each relay has, and what the reports say."""

    def __init__(self, num_relays: int) -> None:
        self.state = ClusterState()
        self.now = 100.0
        self.chains: list[list[int]] = []
        for machine in range(num_relays):
            self.note(broadcast.take_in_start(self.state, MachineId(machine), self.now))
        self.state.trainer.version = VERSION
        broadcast.note_progress(self.state, self.now)
        self.chains.clear()
        self.silent: set[int] = set()
        self.received = dict.fromkeys(range(num_relays), 0)
        self.sent = dict.fromkeys(range(num_relays), 0)
        self.sender_bytes = 0
        self.broken: set[int] = set()

    def note(self, commands: Iterable[AnyCommand]) -> None:
        self.chains += [[int(m) for m in c.machines] for c in commands if isinstance(c, SetChain)]

    def tick(self, *, moving: Iterable[int] = (), sender_moves: bool = False) -> None:
        """0.1 s: those that move get and send some bytes more; everybody reports but the silent ones."""
        self.now += TICK_S
        self.sender_bytes += 10 * sender_moves
        for machine in self.received:
            if machine in moving:
                self.received[machine] += 10
                self.sent[machine] += 10
            if machine not in self.silent:
                report = RelayReport(
                    MachineId(machine),
                    VERSION,
                    self.received[machine],
                    VERSION,
                    self.sent[machine],
                    machine in self.broken,
                )
                broadcast.take_in_report(self.state, report, self.now)
        broadcast.take_in_sender_report(self.state, SenderReport(VERSION, self.sender_bytes, False), self.now)
        self.note(broadcast.pass_by_stalled(self.state, self.now))

    def ticks(self, seconds: float, *, moving: Iterable[int] = (), sender_moves: bool = False) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick(moving=moving, sender_moves=sender_moves)


def test_a_broadcast_that_moves_is_left_alone():
    world = Broadcast(4)
    world.ticks(5.0, moving=range(4), sender_moves=True)
    assert world.chains == []


@pytest.mark.parametrize("hung", [0, 1, 2])
def test_a_relay_at_which_it_stands_still_goes_to_the_end_after_six_tenths_of_a_second(hung: int):
    world = Broadcast(4)
    world.ticks(1.0, moving=range(4), sender_moves=True)
    hung_at_s = world.now
    world.silent.add(hung)
    for machine in range(hung):
        broadcast.take_in_complete(world.state, VersionComplete(MachineId(machine), VERSION), world.now)
    while not world.chains:
        world.tick()
    assert world.chains == [[*(m for m in range(4) if m != hung), hung]]
    assert broadcast.STALL_S < world.now - hung_at_s < broadcast.STALL_S + 2 * TICK_S


def test_as_long_as_the_one_before_it_sends_a_silent_relay_is_not_passed_by():
    """Its reports may be late by another way than its bytes."""
    world = Broadcast(4)
    world.ticks(1.0, moving=range(4), sender_moves=True)
    world.silent.add(1)
    world.received[0] += 1000
    for _ in range(40):
        world.sent[0] += 10
        world.tick(moving=[2, 3], sender_moves=True)
    assert world.chains == []


def test_the_last_relay_keeps_nobody_waiting_and_stays():
    world = Broadcast(3)
    world.ticks(1.0, moving=range(3), sender_moves=True)
    for machine in (0, 1):
        broadcast.take_in_complete(world.state, VersionComplete(MachineId(machine), VERSION), world.now)
    world.silent.add(2)
    world.ticks(3.0)
    assert world.chains == []


def test_a_relay_that_waits_for_one_before_it_is_not_to_blame():
    world = Broadcast(4)
    world.ticks(1.0, moving=range(4), sender_moves=True)
    # Nothing new comes from the trainer: all have the same, and nobody has more to give.
    world.state.trainer.sender.heard_at_s = -1e9
    for _ in range(30):
        world.now += TICK_S
        for machine in range(4):
            report = RelayReport(MachineId(machine), VERSION, world.received[machine], VERSION, world.sent[machine])
            broadcast.take_in_report(world.state, report, world.now)
        world.note(broadcast.pass_by_stalled(world.state, world.now))
    assert world.chains == []


def test_a_relay_that_is_hung_after_it_has_everything_is_to_blame_not_the_one_behind_it():
    world = Broadcast(4)
    world.ticks(0.5, moving=range(4), sender_moves=True)
    for machine in (0, 1):
        broadcast.take_in_complete(world.state, VersionComplete(MachineId(machine), VERSION), world.now)
    world.silent.add(1)
    world.ticks(0.9)
    assert world.chains == [[0, 2, 3, 1]]


def test_a_broken_link_and_silence_together_are_enough_sooner():
    world = Broadcast(4)
    world.ticks(0.5, moving=range(4), sender_moves=True)
    world.received[0] += 100
    world.silent.add(1)
    world.broken.add(0)
    world.ticks(0.4)
    assert world.chains == [[0, 2, 3, 1]]


def test_a_relay_whose_own_link_is_the_trouble_goes_after_two_behind_it():
    """Its reports come, by another way, but what it sends arrives nowhere."""
    world = Broadcast(5)
    world.ticks(0.5, moving=range(5), sender_moves=True)
    for machine in (0, 1):
        broadcast.take_in_complete(world.state, VersionComplete(MachineId(machine), VERSION), world.now)
    world.ticks(1.6)
    assert world.chains == [[0, 1, 3, 4, 2], [0, 3, 4, 2, 1]]


def test_a_dead_trainer_gets_no_master_moved():
    world = Broadcast(3)
    for _ in range(30):
        world.now += TICK_S
        world.note(broadcast.pass_by_stalled(world.state, world.now))
    assert world.chains == []


def test_orders_become_rare_where_moving_does_not_help():
    """Everything stands still for ever: each relay waits twice as long as before, to a limit."""
    world = Broadcast(4)
    world.ticks(60.0)
    first = len(world.chains)
    assert 0 < first <= 4 * broadcast.NUM_DOUBLINGS_MAX
    world.ticks(60.0)
    assert len(world.chains) - first <= 4


@pytest.mark.parametrize("num_stalls", [[0, 0], [0, 3], [3, 0], [9, 9], [0, 9]])
def test_nobody_waits_for_ever_behind_a_relay_that_is_cut_off(num_stalls: list[int]):
    """However often each was blamed before, rightly or because the machine that told of its progress was slow."""
    world = Broadcast(4)
    world.ticks(0.5, moving=range(4), sender_moves=True)
    for machine, count in zip((2, 3), num_stalls, strict=True):
        world.state.relays[MachineId(machine)].num_stalls = count
    for machine in (0, 1):
        broadcast.take_in_complete(world.state, VersionComplete(MachineId(machine), VERSION), world.now)
    # 2 still reports by another way, 3 lacks what 2 cannot pass on.
    world.received[2] += 10
    world.ticks(2 * broadcast.STALL_S * 2**broadcast.NUM_DOUBLINGS_MAX)
    assert any(chain.index(3) < chain.index(2) for chain in world.chains)


def test_a_relay_that_catches_up_is_forgiven():
    world = Broadcast(3)
    world.ticks(0.5, moving=range(3), sender_moves=True)
    world.silent.add(0)
    world.ticks(0.8)
    assert world.chains == [[1, 2, 0]]
    for machine in range(3):
        broadcast.take_in_complete(world.state, VersionComplete(MachineId(machine), VERSION), world.now)
    assert [relay.num_stalls for relay in world.state.relays.values()] == [0, 0, 0]


def test_a_late_joiner_comes_last_and_nobody_else_s_upstream_changes():
    world = Broadcast(3)
    world.note([broadcast.leave(world.state, MachineId(1), world.now)])
    world.note(broadcast.take_in_start(world.state, MachineId(1), world.now))
    assert world.chains == [[0, 2], [0, 2, 1]]


def test_before_the_first_version_the_chain_is_in_the_machines_order():
    state = ClusterState()
    for machine in (2, 0, 1):
        list(broadcast.take_in_start(state, MachineId(machine), 0.0))
    assert state.chain == [0, 1, 2]
