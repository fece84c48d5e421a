"""Joins the processes that train together, and carries what they have to tell each other.

    rank 0: Rendezvous(host) ── address ──► every rank: join(…) ──► Ranks: mesh, sum(), gather_on_first()

One rank on a CPU has nobody to join: it is ALONE, and none of this is used.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - it is in its documentation
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laminar.config import TrainerConfig

MESH_DIM = "ranks"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The trainer's ranks, as one of them sees them. What a method says of ranks holds for all: each must call it."""

    rank: int
    num_ranks: int
    device: torch.device
    mesh: DeviceMesh | None
    """Over which weights are sharded; none: they are whole, and torch.distributed is not used."""
    checkpoint_group: dist.ProcessGroup | None
    """For the thread that writes checkpoints: two threads of one rank must not use one group."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Over the ranks, on every rank; a scalar or any shape that all agree on."""
        if self.mesh is None:
            return value
        total = value.clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total

    def gather_on_first(self, values: Tensor) -> Tensor:
        """All ranks' values end to end on rank 0, their own on the others: [num_values], as many as each has."""
        if self.mesh is None or self.num_ranks == 1:
            return values
        counts = self.sum(torch.eye(self.num_ranks, dtype=torch.int64, device=values.device)[self.rank] * len(values))
        # NCCL knows no bools, and neither backend ragged lists.
        padded = values.new_zeros(int(counts.max()), dtype=torch.uint8 if values.dtype == torch.bool else values.dtype)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.num_ranks)] if self.is_first else None
        dist.gather(padded, parts, group=self.mesh.get_group(), group_dst=0)
        if parts is None:
            return values
        return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)]).to(values.dtype)

    def leave(self) -> None:
        if self.mesh is not None:
            dist.destroy_process_group()


ALONE = Ranks(rank=0, num_ranks=1, device=torch.device("cpu"), mesh=None, checkpoint_group=None)


def must_join(config: TrainerConfig) -> bool:
    """Whether the ranks need a process group; FSDP2, which also does mixed precision, needs one even for one rank."""
    return config.num_ranks > 1 or config.device != "cpu" or compute_dtype(config) is not torch.float32


def compute_dtype(config: TrainerConfig) -> torch.dtype:
    """Of forward and backward passes; weights, their gradients and the optimizer's state are always float32."""
    if config.compute_dtype is None:
        return torch.float32 if config.device == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.compute_dtype]


def publish_dtype(config: TrainerConfig) -> torch.dtype:
    """Of the weights that are handed over: what an engine on an accelerator serves; float32 on CPU."""
    return torch.float32 if config.device == "cpu" else compute_dtype(config)


class Rendezvous:
    """Where the ranks meet: a c10d store on a free port of `host`, for as long as this object lives.

    On `host` alone, so that with a loopback address nobody else can reach it. Neither the store nor what NCCL and gloo
    send is authenticated: on a cluster its network must be private, as Ray's must.
    """

    def __init__(self, host: str, config: TrainerConfig, deadline_s: float) -> None:
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            self._store = TCPStore(
                host,
                port,
                config.num_ranks,
                is_master=True,
                timeout=timedelta(seconds=deadline_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        self.address = (host, port)


def join(address: tuple[str, int], rank: int, config: TrainerConfig, *, host: str, start_deadline_s: float) -> Ranks:
    """Meet the other ranks and become one of them.

    address: the rendezvous'; host: where the others reach this rank. Raises TimeoutError, naming the place, if they are
    not all there within start_deadline_s. Later, a rank that waits for another gives up after trainer.work_deadline_s.
    """
    # gloo would look up this machine's name, which may be another interface's, or nobody's.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _interface_of(host)
    if config.device == "cuda":
        torch.cuda.set_device(0)  # Ray shows each rank its own accelerator only.
    try:
        store = TCPStore(*address, config.num_ranks, timeout=timedelta(seconds=start_deadline_s))
        # What follows waits as long as work may take, so first make sure that everybody is there.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{other}" for other in range(config.num_ranks)], timedelta(seconds=start_deadline_s))
        dist.init_process_group(
            "gloo" if config.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=config.num_ranks,
            timeout=timedelta(seconds=config.work_deadline_s),
        )
        mesh = init_device_mesh(config.device, (config.num_ranks,), mesh_dim_names=(MESH_DIM,))
        checkpoint_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.work_deadline_s))
        assert isinstance(checkpoint_group, dist.ProcessGroup), "every rank is in the group"
        dist.barrier(checkpoint_group)
    except dist.DistError as error:
        raise TimeoutError(
            f"rank {rank} of {config.num_ranks} waited {start_deadline_s:g} s at {address[0]}:{address[1]} for the "
            f"others: {str(error).splitlines()[0]}"
        ) from error
    return Ranks(rank, config.num_ranks, torch.device(config.device), mesh, checkpoint_group)


def _interface_of(host: str) -> str:
    """The network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    raise ValueError(f"no network interface of this machine has the address {host}, under which Ray knows it")
