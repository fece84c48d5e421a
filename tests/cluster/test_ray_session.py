"""Where the trainer's ranks and the replicas go."""

import pytest

from laminar.cluster.ray_session import Machine, machines_of_ranks, spread_replicas
from laminar.control.messages import MachineId


def machines(*num_gpus: int, local: int = 0) -> list[Machine]:
    return [Machine(MachineId(i), f"10.0.0.{i}", f"node{i}", i == local, num) for i, num in enumerate(num_gpus)]


def test_on_cpu_all_ranks_are_beside_the_driver():
    assert [m.id for m in machines_of_ranks(machines(0, 0, 0, local=1), 3, device="cpu")] == [1, 1, 1]


def test_each_accelerator_takes_one_rank_the_driver_s_machine_s_first():
    cluster = machines(4, 2, 4, local=1)
    assert [m.id for m in machines_of_ranks(cluster, 7, device="cuda")] == [1, 1, 0, 0, 0, 0, 2]


def test_too_few_accelerators_are_the_user_s_mistake():
    with pytest.raises(ValueError, match=r"trainer.num_ranks=4 .* Ray knows 3 on 2 machine\(s\); lower it"):
        machines_of_ranks(machines(1, 2), 4, device="cuda")


def spread(cluster: list[Machine], num_replicas: int, *, gpus: int, num_ranks: int = 0, emulated: bool = False):
    ranks = machines_of_ranks(cluster, num_ranks, device="cuda")
    found = spread_replicas(cluster, ranks, num_gpus_per_replica=gpus, num_replicas=num_replicas, emulated=emulated)
    assert list(found) == [machine.id for machine in cluster]
    return tuple(found.values())


@pytest.mark.parametrize(
    ("num_gpus", "num_replicas", "gpus", "num_ranks", "expected"),
    [
        ((0, 0), 5, 0, 0, (3, 2)),
        ((8, 8, 8, 8), 28, 1, 4, (4, 8, 8, 8)),
        ((8, 8, 8, 8), 24, 1, 8, (0, 8, 8, 8)),
        ((8, 8), 5, 1, 0, (3, 2)),
        # Ranks leave 3 GPUs, which hold one replica of two.
        ((8, 8), 5, 2, 5, (1, 4)),
    ],
)
def test_replicas_take_what_the_ranks_leave_as_evenly_as_it_goes(num_gpus, num_replicas, gpus, num_ranks, expected):
    assert spread(machines(*num_gpus), num_replicas, gpus=gpus, num_ranks=num_ranks) == expected


def test_emulated_machines_share_this_one_s_gpus():
    assert spread(machines(8, 0), 4, gpus=1, num_ranks=4, emulated=True) == (2, 2)
    with pytest.raises(ValueError, match=r"lower rollout.num_replicas to 4"):
        spread(machines(8, 0), 5, gpus=1, num_ranks=4, emulated=True)


@pytest.mark.parametrize(
    ("num_gpus", "num_replicas", "gpus", "num_ranks", "cause"),
    [
        ((8, 8), 13, 1, 4, r"machine 0 \(10.0.0.0\) has 8 GPUs, 4 of them for trainer ranks, .* lower .* to 12"),
        ((3, 3), 3, 2, 0, r"num_replicas=3 replicas of 2 GPUs .* to 2, or add machines"),
        ((0,), 1, 1, 0, "Ray knows no GPUs"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_waits_for_ever(num_gpus, num_replicas, gpus, num_ranks, cause):
    with pytest.raises(ValueError, match=cause):
        spread(machines(*num_gpus), num_replicas, gpus=gpus, num_ranks=num_ranks)
