"""Starts Ray on this machine or joins a running cluster, and places actors on its machines."""

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from laminar.config import ClusterConfig, Config, TrainerConfig
from laminar.control.messages import MachineId
from laminar.control.placement import spread

OBJECT_STORE_BYTES = 256 * 2**20
"""Ray would take 30 % of the memory; here it only carries control messages."""
PLACES_PER_MACHINE = 10_000


class Machine(msgspec.Struct, frozen=True):
    """A Ray node, or with `cluster.address=local` an emulated machine on this one."""

    id: MachineId
    host: str
    """Where other machines reach it."""
    node_id: str | None
    is_local: bool
    num_gpus: int = 0
    """Accelerators that Ray knows there, whoever uses them."""


class RaySession:
    """Ray for as long as the run lasts. Raises ValueError for a cluster that cannot be joined, or joined safely."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray  # seconds, so only once a run is certain to start

        self._ray = ray
        self.folder: Path | None = None
        if config.address == "local":
            self._start_here()
        else:
            self._join()

    def machine(self, id: MachineId) -> Machine:
        return self.machines[id]

    def machines_of_ranks(self, config: TrainerConfig) -> list[Machine]:
        """Where each of the trainer's ranks goes. Raises ValueError if there are too few accelerators."""
        return machines_of_ranks(self.machines, config.num_ranks, device=config.device)

    def spread_replicas(self, config: Config) -> dict[MachineId, int]:
        """How many replicas each machine gets. Raises ValueError if they do not fit beside the trainer's ranks."""
        return spread_replicas(
            self.machines,
            self.machines_of_ranks(config.trainer) if config.trainer.device != "cpu" else [],
            num_gpus_per_replica=config.engine.num_gpus,
            num_replicas=config.rollout.num_replicas,
            emulated=self._config.address == "local",
        )

    def place(
        self,
        actor: type,
        machine: Machine,
        *,
        num_gpus: int = 0,
        concurrency_groups: dict[str, int] | None = None,
    ) -> Any:
        """The actor class, ready for `.remote(…)`, to run on this machine with so many of its GPUs to itself."""
        if machine.node_id is None:
            where: dict[str, Any] = {"resources": {f"machine_{machine.id}": 1}, "num_cpus": 0}
        else:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            strategy = NodeAffinitySchedulingStrategy(machine.node_id, soft=False)
            where = {"scheduling_strategy": strategy, "num_cpus": self._config.cpus_per_process}
        one_thread = {"env_vars": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
        remote: Any = self._ray.remote(concurrency_groups=concurrency_groups or {})  # pyright: ignore[reportCallIssue]
        return remote(actor).options(max_restarts=0, runtime_env=one_thread, num_gpus=num_gpus, **where)

    def close(self) -> None:
        self._ray.shutdown()

    def _start_here(self) -> None:
        # Ray's sockets lie below this folder and their paths are limited to 107 bytes.
        temporary = Path(tempfile.gettempdir()) / f"laminar-ray-{os.getuid()}"
        self._ray.init(
            address="local",
            num_cpus=PLACES_PER_MACHINE,
            resources={f"machine_{i}": PLACES_PER_MACHINE for i in range(self._config.num_machines)},
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(temporary),
        )
        self.folder = _session_folder(temporary)
        num_gpus = int(self._ray.cluster_resources().get("GPU", 0))
        self.machines = [
            Machine(MachineId(i), "127.0.0.1", None, is_local=True, num_gpus=num_gpus if i == 0 else 0)
            for i in range(self._config.num_machines)
        ]

    def _join(self) -> None:
        address = self._config.address
        if os.environ.get("RAY_AUTH_MODE", "token") != "token":
            raise ValueError(
                f"cluster.address={address}: RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']}, so anyone who reaches the "
                "cluster could run code in it; start it with RAY_AUTH_MODE=token and unset the variable here"
            )
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ValueError(
                f"cluster.address={address}: no Ray cluster answers there ({error}); start one with "
                "`ray start --head`, or use cluster.address=local"
            ) from error
        here = self._ray.get_runtime_context().get_node_id()
        nodes = sorted(
            (node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)))
            for node in self._ray.nodes()
            if node["Alive"]
        )
        self.machines = [
            Machine(MachineId(i), host, node, is_local=node == here, num_gpus=num_gpus)
            for i, (node, host, num_gpus) in enumerate(nodes)
        ]


def machines_of_ranks(machines: Sequence[Machine], num_ranks: int, *, device: str) -> list[Machine]:
    """A machine for each rank of the trainer: beside the driver first, whose folder holds the checkpoints.

    On CPU they all fit there; with accelerators each machine takes as many ranks as it has, so ranks that talk most,
    those next to each other, mostly share a machine. Raises ValueError if there are too few.
    """
    near_first = sorted(machines, key=lambda machine: (not machine.is_local, machine.id))
    if device == "cpu":
        return [near_first[0]] * num_ranks
    places = [machine for machine in near_first for _ in range(machine.num_gpus)]
    if len(places) < num_ranks:
        raise ValueError(
            f"trainer.num_ranks={num_ranks} with trainer.device={device} needs as many accelerators, and Ray knows "
            f"{len(places)} on {len(machines)} machine(s); lower it, or join a larger cluster with cluster.address"
        )
    return places[:num_ranks]


def spread_replicas(
    machines: Sequence[Machine],
    ranks: Sequence[Machine],
    *,
    num_gpus_per_replica: int,
    num_replicas: int,
    emulated: bool,
) -> dict[MachineId, int]:
    """How many replicas each machine gets, on what the trainer's ranks leave of its GPUs.

    ranks: the machine of each rank that needs a GPU. emulated: all machines share the GPUs of the first one. Raises
    ValueError if the GPUs do not suffice: Ray would let replicas wait for ever.
    """
    unlimited = dict.fromkeys(machine.id for machine in machines)
    if num_gpus_per_replica == 0:
        return spread(num_replicas, unlimited)
    free = [machine.num_gpus - sum(rank.id == machine.id for rank in ranks) for machine in machines]
    rooms = {m.id: max(0, num_gpus) // num_gpus_per_replica for m, num_gpus in zip(machines, free, strict=True)}
    if min(free) < 0 or sum(rooms.values()) < num_replicas:
        found = ", ".join(
            f"machine {machine.id} ({machine.host}) has {machine.num_gpus} GPUs, {machine.num_gpus - num_free} of them "
            "for trainer ranks"
            for machine, num_free in zip(machines, free, strict=True)
            if machine.num_gpus or num_free
        )
        raise ValueError(
            f"rollout.num_replicas={num_replicas} replicas of {num_gpus_per_replica} GPUs "
            f"(engine.tensor_parallel_size) do not fit: {found or 'Ray knows no GPUs'}; lower rollout.num_replicas to "
            f"{sum(rooms.values())}, or add machines"
        )
    return spread(num_replicas, unlimited if emulated else rooms)


def _session_folder(temporary: Path) -> Path:
    """The folder of this process's session: Ray names it with the pid of who started it."""
    return next(folder for folder in temporary.glob("session_*") if folder.name.endswith(f"_{os.getpid()}"))
