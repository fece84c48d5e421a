"""Keeps what is asked after every event at hand, where a search through all replicas would take longer than all else.

Whoever changes what a replica holds, awaits or serves calls `update` with it; `ClusterState.check` compares the whole
with a search.
"""

from collections.abc import Iterable

import msgspec

from laminar.control.parts import ReplicaId
from laminar.control.replica_state import Replica


class Index(msgspec.Struct):
    empty: dict[ReplicaId, None] = {}
    """Replicas that may load or take a new batch, in the order in which they became so."""
    served: dict[ReplicaId, int] = {}
    """The version that each replica with trajectories samples from."""
    num_serving: dict[int, int] = {}
    """How many replicas each of these versions has; no version has none."""

    def update(self, replica: Replica) -> None:
        if replica.empty:
            self.empty[replica.id] = None
        else:
            self.empty.pop(replica.id, None)
        version = replica.version if replica.trajectories else None
        if version != self.served.get(replica.id):
            self._serve(replica.id, version)

    def remove(self, id: ReplicaId) -> None:
        """The replica is no more."""
        self.empty.pop(id, None)
        self._serve(id, None)

    def _serve(self, id: ReplicaId, version: int | None) -> None:
        if (before := self.served.pop(id, None)) is not None:
            self.num_serving[before] -= 1
            if not self.num_serving[before]:
                del self.num_serving[before]
        if version is not None:
            self.served[id] = version
            self.num_serving[version] = self.num_serving.get(version, 0) + 1


def index_of(replicas: Iterable[Replica]) -> Index:
    """What the index of these replicas must be equal to."""
    index = Index()
    for replica in replicas:
        index.update(replica)
    return index
