"""Broadcasts by Ray's object store: one put, and a task on each of several nodes that takes the object."""

import os
import sys
import time

import msgspec

from laminar.bench.speech import Speech

DEADLINE_S = 120.0
STORE_BYTES = 512 << 20


class Start(msgspec.Struct):
    """The first line."""

    num_nodes: int
    payload_bytes: int


def main(start: Start) -> None:
    speech = Speech()
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    import numpy as np
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE_BYTES})
    for index in range(start.num_nodes):
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, resources={f"machine_{index}": 1})
    ray.init(address=cluster.address, log_to_driver=False)

    @ray.remote
    def take(weights: np.ndarray) -> float:
        assert weights[-1] == 1
        return time.monotonic()

    takers = [take.options(resources={f"machine_{index}": 1}) for index in range(start.num_nodes)]
    nothing = ray.put(np.ones(1, np.uint8))
    ray.get([taker.remote(nothing) for taker in takers], timeout=DEADLINE_S)  # Their workers are up now.
    speech.reply(None)
    for _ in sys.stdin:
        weights = ray.put(np.ones(start.payload_bytes, np.uint8))
        began_s = time.monotonic()
        speech.reply(max(ray.get([taker.remote(weights) for taker in takers], timeout=DEADLINE_S)) - began_s)
        del weights
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.stdin.readline(), type=Start))
