"""Settings of the machines: relays, deadlines, Ray, what is written down."""

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.section import Count, Seconds, Section


class RelayConfig(Section):
    num_versions_kept: Annotated[int, Field(ge=3)] = 4
    """Weight versions a relay holds at most; the oldest that nobody serves goes first."""
    chunk_bytes: Count | None = None
    """Bytes a chunk; none: from the link's start-up time and bandwidth (T* formula)."""
    link_startup_s: Annotated[float, Field(ge=0)] = 5e-6
    """Start-up time of one message on the link between machines."""
    link_bytes_per_s: Annotated[float, Field(gt=0)] = 3e9
    """Bandwidth of the link between machines."""
    transport: Literal["sockets", "nixl"] = "sockets"
    """What carries weights between machines: plain sockets, or NIXL (UCX: InfiniBand, RoCE, TCP; extra `rdma`)."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of every relay; 0: any free one."""
    publish_deadline_s: Seconds = 60.0
    """Longest wait for the previous hand-over to be sent, and for a version to be complete everywhere."""
    lease_deadline_s: Seconds = 60.0
    """A reader that holds a version longer is taken for dead and its segment is abandoned."""
    refresh_wait_max_s: Seconds = 2.0
    """A replica waits this long at most for a version that is on its way."""


class FaultsConfig(Section):
    report_deadline_s: Seconds = 5.0
    """A replica or relay that reports nothing for so long is taken for lost."""
    start_deadline_s: Seconds = 300.0
    """A process that is not ready after this long fails the start, by name."""
    load_deadline_s: Seconds = 60.0
    """A replica that loads weights for longer is taken for lost."""
    num_replacements_max: Annotated[int, Field(ge=0)] = 16
    """Replicas, relays and trainers replaced in one start of a run; beyond, losses are no longer made good."""


class ClusterConfig(Section):
    address: str = "local"
    """`local` starts Ray on this machine; `auto` or host:port joins a running cluster."""
    num_machines: Count = 1
    """With `local`: emulated machines, each with its own relay and its share of the replicas."""
    cpus_per_process: Annotated[float, Field(gt=0)] = 1.0
    """CPUs that Ray reserves for a replica or a trainer rank on a joined cluster; `local` reserves none."""


class ObserveConfig(Section):
    tensorboard: bool = True
    """Whether metrics also go to TensorBoard files in the run's folder; metrics.jsonl always does."""
    wandb_project: str | None = None
    """Weights & Biases project that metrics also go to (the `wandb` extra); none: nothing is sent anywhere."""
    snapshot_interval_events: Count = 20000
    """Events between two snapshots of the control state, where the event log rotates."""
