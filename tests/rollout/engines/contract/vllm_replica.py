"""A process with a vLLM engine, for a test to kill: says `up` once it serves."""

import asyncio
import sys
from pathlib import Path

from laminar.config import VllmEngineConfig
from laminar.rollout.engines.vllm_setup import start_vllm


async def serve(model_path: Path) -> None:
    config = VllmEngineConfig(device="cpu", dtype="float32", eager=True, kv_capacity_tokens=512)
    await start_vllm(config, model_path, num_tokens_max=512)
    sys.stdout.write("up\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
