"""Splits a mini-batch's trajectories over the ranks, so that all make the same number of micro-batches."""

from collections.abc import Sequence

from laminar.train.packing import plan_micro_batches


def split_over_ranks(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Which trajectories each rank trains: about equally many tokens for each; ascending indices into `lengths`.

    The longest first, each to the rank that has the least so far, so the ranks differ by one trajectory's length at
    most. A function of the lengths alone: each rank computes it and they agree.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return [sorted(share) for share in shares]


def plan_for_rank(lengths: Sequence[int], rank: int, num_ranks: int, tokens_max: int) -> list[list[int]]:
    """This rank's micro-batches, as indices into `lengths`.

    Those that it lacks to be as many as any rank's are empty: every forward and backward pass gathers weights from all
    ranks, so one that made fewer would leave the others waiting for ever.
    """
    plans: list[list[list[int]]] = []
    for share in split_over_ranks(lengths, num_ranks):
        plan = plan_micro_batches([lengths[index] for index in share], tokens_max)
        plans.append([[share[i] for i in planned] for planned in plan])
    num_micro_batches = max(map(len, plans))
    return plans[rank] + [[] for _ in range(num_micro_batches - len(plans[rank]))]
