"""Is one rank of a gloo broadcast: what torch.distributed takes for what the relay chain does."""

import os
import sys
import time
from datetime import timedelta

import msgspec

from laminar.bench.speech import Speech

DEADLINE_S = 120.0


class Start(msgspec.Struct):
    """The first line. store: host and port of rank 0, where the ranks meet."""

    rank: int
    num_ranks: int
    interface: str
    store: tuple[str, int]
    payload_bytes: int


def main(start: Start) -> None:
    speech = Speech()
    os.environ["GLOO_SOCKET_IFNAME"] = start.interface
    import torch
    from torch import distributed

    host, port = start.store
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=start.rank,
        world_size=start.num_ranks,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    weights = torch.full((start.payload_bytes // 4,), float(start.rank))
    speech.reply(None)
    for _ in sys.stdin:
        distributed.barrier()
        began_s = time.monotonic()
        distributed.broadcast(weights, src=0)
        speech.reply([began_s, time.monotonic()])
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.stdin.readline(), type=Start))
