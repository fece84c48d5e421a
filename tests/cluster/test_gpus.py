"""Whether a run's replicas have the GPUs that they need is known before any of them waits for one."""

import pytest

from laminar.cluster.ray_session import Machine, refuse_too_few_gpus
from laminar.control.messages import MachineId

NODES = [Machine(MachineId(i), f"host{i}", f"node{i}", is_local=i == 0) for i in range(2)]
EMULATED = [Machine(MachineId(i), "127.0.0.1", None, is_local=True) for i in range(2)]


def test_each_machine_holds_its_share():
    refuse_too_few_gpus(NODES, {None: 16, "node0": 8, "node1": 8}, num_gpus=2, num_replicas=8)
    refuse_too_few_gpus(EMULATED, {None: 8}, num_gpus=2, num_replicas=4)
    refuse_too_few_gpus(EMULATED, {None: 0}, num_gpus=0, num_replicas=4)


@pytest.mark.parametrize(
    ("machines", "gpus_of", "num_replicas", "message"),
    [
        (NODES, {None: 12, "node0": 8, "node1": 4}, 6, r"machine 1 \(host1\) has 4 GPUs, .* is 3 replicas of 2 GPUs"),
        (NODES, {None: 8, "node0": 4, "node1": 4}, 5, r"machine 0 .* is 3 replicas of 2 GPUs"),
        # Emulated machines share what this one has.
        (EMULATED, {None: 4}, 4, r"machine 0 .*127.0.0.1.* has 4 GPUs, .* is 4 replicas of 2 GPUs"),
    ],
)
def test_a_share_that_does_not_fit_is_refused_by_name(machines, gpus_of, num_replicas, message):
    with pytest.raises(ValueError, match=message):
        refuse_too_few_gpus(machines, gpus_of, num_gpus=2, num_replicas=num_replicas)
