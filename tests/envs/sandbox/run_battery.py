"""Makes every attack with one backend, as whoever runs this: `python -m tests.envs.sandbox.run_battery BACKEND`.

Needs the standard library alone, so that the system's own interpreter can run it as a user without rights. Prints what
got through, and how many attacks there were.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from laminar.envs.sandbox.attacks import ESCAPEE
from laminar.envs.sandbox.selftest import LOOP_WALL_S, endless, judge, target
from tests.envs.sandbox.battery import ATTACKS
from tests.envs.sandbox.machine import lacking, pool


async def battery(backend: str) -> dict[str, object]:
    if (lacks := await lacking(backend)) is not None:
        return {"lacks": lacks}
    flaws: list[str] = []
    async with pool(backend) as sandbox:
        with target() as aim:
            for attack in ATTACKS:
                wall_s = 2 * LOOP_WALL_S if endless(attack) else None
                outcome = await sandbox.run(attack.program(aim), wall_s=wall_s)
                if (flaw := judge(attack, outcome)) is not None:
                    flaws.append(f"{attack.kind}: {attack.name}: {flaw}")
                if pids := escapees():
                    flaws.append(f"{attack.kind}: {attack.name}: {pids} live on")
                if text_of(aim.file) != aim.secret:
                    flaws.append(f"{attack.kind}: {attack.name}: the file was changed")
    return {"flaws": flaws, "num_attacks": len(ATTACKS), "uid": os.getuid()}


def text_of(file: str) -> str:
    return Path(file).read_text()


def escapees() -> list[int]:
    """Processes on this machine that called themselves so."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and Path(f"/proc/{name}/comm").read_text().strip() == ESCAPEE:
                found.append(int(name))
        except OSError:
            continue  # it has ended
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(battery(sys.argv[1]))))
