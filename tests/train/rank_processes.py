"""Starts the ranks of a trainer as processes, as the cluster does, and runs a function of the test's on each."""

import multiprocessing as mp
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from laminar.config import Config
from laminar.train.ranks import Ranks, Rendezvous, join

DEADLINE_S = 200.0
HERE = "127.0.0.1"


class RankFailed(Exception):
    """What a rank raised, as text."""


def on_ranks(
    config: Config,
    work: Callable[..., Any],
    *arguments: Any,
    num_missing: int = 0,
    start_deadline_s: float = DEADLINE_S,
) -> list[Any]:
    """`work(ranks, *arguments)` on each of config.trainer.num_ranks processes; their results, by rank.

    work: a function of a module that a new process can import. num_missing: ranks, the last ones, that never come.
    """
    rendezvous = Rendezvous(HERE, config.trainer, start_deadline_s)
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(config.trainer.num_ranks - num_missing):
        ours, theirs = context.Pipe(duplex=False)
        place = (rendezvous.address, rank, start_deadline_s)
        process = context.Process(target=_rank, args=(theirs, place, config, work, arguments))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        with ThreadPoolExecutor(len(pipes)) as threads:
            return list(threads.map(_receive, pipes))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError(f"a rank gave no result within {DEADLINE_S:g} s")
    result = pickle.loads(pipe.recv_bytes())
    if isinstance(result, RankFailed):
        raise result
    return result


def _rank(
    pipe: Connection,
    place: tuple[tuple[str, int], int, float],
    config: Config,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    address, rank, start_deadline_s = place
    try:
        ranks: Ranks = join(address, rank, config.trainer, host=HERE, start_deadline_s=start_deadline_s)
        # As bytes: a pipe would pass tensors by file descriptors, which end with this process.
        pipe.send_bytes(pickle.dumps(work(ranks, *arguments)))
        ranks.leave()
    except Exception:  # noqa: BLE001 - the test is to see it, whatever it is
        pipe.send_bytes(pickle.dumps(RankFailed(traceback.format_exc())))
