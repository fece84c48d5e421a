"""Is the driver of a run, as far as others see it: registers itself and a process of its own, then waits for its end.

python -m tests.cluster.run_driver RUN_ID RAY_FOLDER     prints its worker's pid
"""

import subprocess
import sys
from pathlib import Path

from laminar.cluster.processes import ProcessRegistry

LIFE_S = "60"


def main(run_id: str, ray_folder: Path) -> None:
    registry = ProcessRegistry(run_id)
    # A session of its own, as Ray's processes have: no signal to the driver's group reaches it.
    worker = subprocess.Popen(["sleep", LIFE_S], start_new_session=True)
    registry.add_descendants()
    registry.set_ray_folder(ray_folder)
    print(worker.pid, flush=True)
    worker.wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
