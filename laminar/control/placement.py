"""Spreads replicas over machines."""

from collections.abc import Sequence


def spread(num_replicas: int, rooms: Sequence[int | None]) -> tuple[int, ...]:
    """How many of the replicas each machine gets, as evenly as their rooms allow; the first ones get what is over.

    rooms: how many each can hold, None for any number. Together they must hold all.
    """
    nums = [0] * len(rooms)
    for _ in range(num_replicas):
        free = [i for i, room in enumerate(rooms) if room is None or nums[i] < room]
        assert free, f"{num_replicas} replicas do not fit {rooms}"
        nums[min(free, key=nums.__getitem__)] += 1
    return tuple(nums)
