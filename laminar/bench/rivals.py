"""Measures other ways to bring one payload to several machines, over the same links as the chain."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from laminar.bench.child import Child
from laminar.bench.machines import Machine

NUM_ROUNDS = 3
STORE_PORT = 29511


def raw_socket_s(machines: list[Machine], payload_bytes: int) -> float:
    """One copy from the first machine to the second, over one plain socket: the median of three."""
    return _copies_s(machines[:2], payload_bytes, NUM_ROUNDS)


def sequential_s(machines: list[Machine], payload_bytes: int) -> float:
    """The first machine sends to each of the others, one after the other."""
    return _copies_s(machines, payload_bytes, 1)


def gloo_s(machines: list[Machine], payload_bytes: int) -> float:
    """torch.distributed.broadcast from the first machine to the others, after one to warm up."""
    store = (machines[0].host, STORE_PORT)
    starts = [
        {
            "rank": machine.index,
            "num_ranks": len(machines),
            "interface": machine.interface,
            "store": store,
            "payload_bytes": payload_bytes,
        }
        for machine in machines
    ]
    with _children("laminar.bench.gloo_process", machines, starts) as ranks:
        _broadcast(ranks)
        times = _broadcast(ranks)
        return max(ended for _, ended in times) - times[0][0]


def ray_s(machine: Machine, num_nodes: int, payload_bytes: int) -> float:
    """Ray's object store, from a head node to others on the same machine, after one to warm up."""
    start = {"num_nodes": num_nodes, "payload_bytes": payload_bytes}
    with _children("laminar.bench.ray_process", [machine], [start]) as (driver,):
        driver.ask({})
        return driver.ask({})


def _broadcast(ranks: list[Child]) -> list[tuple[float, float]]:
    """When each rank began and ended."""
    return [told.result() for told in [rank.order({}) for rank in ranks]]


def _copies_s(machines: list[Machine], payload_bytes: int, num_rounds: int) -> float:
    starts = [{"host": machine.host, "payload_bytes": payload_bytes} for machine in machines]
    with _children("laminar.bench.copy_process", machines, starts) as copiers:
        addresses = [copier.started.result() for copier in copiers[1:]]
        copiers[0].ask({"send_to": addresses[:1]})
        return statistics.median(copiers[0].ask({"send_to": addresses}) for _ in range(num_rounds))


@contextmanager
def _children(module: str, machines: list[Machine], starts: list[dict[str, Any]]) -> Iterator[list[Child]]:
    children = [
        Child(module, machine, start, lambda _news: None) for machine, start in zip(machines, starts, strict=True)
    ]
    try:
        for child in children:
            child.started.result(120)
        yield children
    finally:
        for child in children:
            child.end()
