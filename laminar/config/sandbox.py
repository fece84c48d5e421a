"""Settings of the sandbox, in which an environment runs code that the model wrote."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from laminar.config.section import Count, Seconds, Section


class LocalSandboxConfig(Section):
    """Processes on the machine of the replicas, confined by bubblewrap or by Landlock."""

    kind: Literal["local"] = "local"
    """Which sandbox runs code; this one is on every machine, shared by its replicas."""
    backend: Literal["auto", "bubblewrap", "landlock"] = "auto"
    """`auto`: bubblewrap where it works, else Landlock; without either, or if an attack succeeds, nothing starts."""
    num_slots: Count = 2
    """Calls that run at once on a machine; each slot keeps one process ready."""
    num_queued_max: Count = 1024
    """Calls that may wait for a slot; one more is refused, and fails its trajectory by name."""
    queue_deadline_s: Seconds = 120.0
    """Longest wait for a slot; then the call is refused."""
    python: Path | None = None
    """Interpreter of the code, 3.10 or newer; none: /usr/bin/python3, else the one that runs Laminar."""
    packages: tuple[Path, ...] = ()
    """Folders to import from besides the standard library, as `site-packages`; readable, never writable."""
    preloaded: tuple[str, ...] = ()
    """Modules imported ahead, so that no call pays for them."""
    wall_s: Seconds = 10.0
    """Longest time of one call."""
    cpu_s: Count = 10
    """CPU time of each process of a call."""
    memory_bytes: Annotated[int, Field(ge=2**26)] = 2**29
    """Address space of each process of a call, and memory of all together."""
    num_processes: Annotated[int, Field(ge=0)] = 16
    """Processes and threads that a call may start."""
    file_bytes: Annotated[int, Field(ge=2**12)] = 2**26
    """All files together that a call may leave; they are removed when it ends."""
    num_files: Count = 256
    """How many these may be."""
    output_bytes: Count = 65536
    """What a call may print; then it is stopped."""


class HttpSandboxConfig(Section):
    """A service elsewhere that speaks SandboxFusion's protocol (`POST <url>/run_code`)."""

    kind: Literal["http"]
    """Which sandbox runs code; with this one nothing is run on the machines of the run."""
    url: Annotated[str, Field(pattern=r"^https?://.+")]
    """Where the service is, without `/run_code`."""
    num_calls_max: Count = 64
    """Calls that one replica makes at once; the others wait."""
    queue_deadline_s: Seconds = 120.0
    """Longest wait for one of these."""
    wall_s: Seconds = 10.0
    """Longest time of one call, which the service is told; it has 10 s more to answer."""
    memory_bytes: Annotated[int, Field(ge=2**26)] = 2**29
    """Memory of one call, which the service is told."""
    output_bytes: Count = 65536
    """What is taken of the output of a call."""


SandboxConfig = Annotated[LocalSandboxConfig | HttpSandboxConfig, Field(discriminator="kind")]
