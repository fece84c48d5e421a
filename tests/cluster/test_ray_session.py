"""Where the trainer's ranks go."""

import pytest

from laminar.cluster.ray_session import Machine, machines_of_ranks
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
