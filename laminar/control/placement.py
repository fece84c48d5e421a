"""Spreads replicas over machines."""

from collections.abc import Mapping

from laminar.control.parts import MachineId


def spread(num_replicas: int, rooms: Mapping[MachineId, int | None]) -> dict[MachineId, int]:
    """How many of the replicas each machine gets, as evenly as their rooms allow; the first ones get what is over.

    rooms: how many each can hold, None for any number. Together they must hold all.
    """
    nums = dict.fromkeys(rooms, 0)
    for _ in range(num_replicas):
        free = [machine for machine, room in rooms.items() if room is None or nums[machine] < room]
        assert free, f"{num_replicas} replicas do not fit {rooms}"
        nums[min(free, key=nums.__getitem__)] += 1
    return nums
