"""Measures what staleness costs: the quickstart's task, trained on data that is exactly K steps old.

    version t - K ──embedded engine──► 256 responses ──4 updates──► version t + 1

Everything is in one process and deterministic: the trainer and the engine are the product's, the staleness is emulated
by keeping old weights. `--recompute` overwrites the behaviour log-probs by those of the step's first weights, which is
what a system does that recomputes the ratio's denominator: the clip then cannot see the staleness.

    python -m scripts.staleness --staleness 0 4 --seeds 0 1 2 --loss grpo tis
"""

import argparse
import asyncio
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples.iterate.task import compute_score, make_problem
from laminar.config import BatchConfig, Config, DataConfig, EmbeddedEngineConfig, ModelConfig, TrainerConfig
from laminar.control.messages import GroupId, TrajectoryId
from laminar.data.records import Experience, Response
from laminar.relay.layout import TensorForm, laid_out_bytes, lay_out
from laminar.relay.manifest import LeasedVersion, Manifest
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.engine import Request
from laminar.train import packing
from laminar.train.logprobs import token_logprobs
from laminar.train.trainer import Trainer

WARM = Path(__file__).parents[1] / "examples" / "iterate" / "warm"
NUM_PROMPTS, GROUP_SIZE, NUM_MINI_BATCHES = 16, 16, 4
RESPONSE_TOKENS_MAX = 320
NUM_ENGINE_STEPS_MAX = 5000


class Step(msgspec.Struct, frozen=True):
    """version: that which generated the step's data. Shares and nats are means over the step's mini-batches."""

    version: int
    reward: float
    clip_fraction: float
    k3_kl: float
    ratio_max_first: float
    ratio_min_first: float
    """Of the first mini-batch."""


def make_config(*, learning_rate: float = 5e-4, seed: int = 0, loss: str = "grpo") -> Config:
    return Config(
        model=ModelConfig(path=WARM),
        data=DataConfig(
            train_files=(Path("unused.parquet"),), prompt_tokens_max=64, response_tokens_max=RESPONSE_TOKENS_MAX
        ),
        batch=BatchConfig(num_prompts_per_step=NUM_PROMPTS, group_size=GROUP_SIZE, num_mini_batches=NUM_MINI_BATCHES),
        engine=EmbeddedEngineConfig(num_slots=64),
        trainer=TrainerConfig.model_validate(
            {
                "learning_rate": learning_rate,
                "weight_decay": 0.0,
                "micro_batch_tokens_max": 3072,
                "loss": {"kind": loss},
            }
        ),
        seed=seed,
    )


class StaleRun:
    """Trains on data `staleness` steps old; the first steps' data is the initial weights'."""

    def __init__(self, config: Config, *, staleness: int, recompute: bool = False) -> None:
        self.trainer = Trainer(config)
        self._recompute = recompute
        assert isinstance(config.engine, EmbeddedEngineConfig)
        self._engine = EmbeddedEngine(config.engine, WARM)
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(WARM)
        self._random = random.Random(1000 + config.seed)
        self._versions = deque([_published(self.trainer)], maxlen=staleness + 1)

    def step(self) -> Step:
        version, step = self._versions[0], self.trainer.num_steps_done + 1
        batch = asyncio.run(self._generate(version, seed=step))
        if self._recompute:
            batch = recomputed(self.trainer, batch)
        size = len(batch) // NUM_MINI_BATCHES
        metrics = [
            self.trainer.train_mini_batch(step, index, batch[index * size : (index + 1) * size])
            for index in range(NUM_MINI_BATCHES)
        ]
        self.trainer.version = step
        self._versions.append(_published(self.trainer))

        def mean(name: str) -> float:
            return sum(values.get(name, 0.0) for values in metrics) / len(metrics)

        return Step(
            version=version.manifest.version,
            reward=mean("critic/score/mean"),
            clip_fraction=mean("actor/pg_clipfrac"),
            k3_kl=mean("rollout_corr/k3_kl"),
            ratio_max_first=metrics[0].get("rollout_corr/rollout_is_max", 1.0),
            ratio_min_first=metrics[0].get("rollout_corr/rollout_is_min", 1.0),
        )

    async def _generate(self, version: LeasedVersion, seed: int) -> list[Experience]:
        await self._engine.load(version)
        problems = [make_problem(self._random) for _ in range(NUM_PROMPTS)]
        prompts = [self._tokenizer(problem.prompt)["input_ids"] for problem in problems]
        responses, truncated = await _respond(self._engine, prompts, seed)
        texts = self._tokenizer.batch_decode([response.token_ids for response in responses], skip_special_tokens=True)
        return [
            Experience(
                trajectory=TrajectoryId(i),
                group=GroupId(i // GROUP_SIZE),
                prompt_token_ids=tuple(prompts[i // GROUP_SIZE]),
                response=response,
                score=compute_score("iterate", texts[i], problems[i // GROUP_SIZE].answer),
                version=version.manifest.version,
                truncated=truncated[i],
            )
            for i, response in enumerate(responses)
        ]


def recomputed(trainer: Trainer, experiences: Sequence[Experience]) -> list[Experience]:
    """The same trajectories, their log-probs as if the weights being trained had sampled them."""
    logprobs: list[list[float]] = [[] for _ in experiences]
    temperature = trainer.config.rollout.temperature
    for planned in packing.plan_micro_batches(list(map(packing.num_tokens, experiences)), 8192):
        micro_batch = packing.lay_out(experiences, planned)
        with torch.no_grad():
            found, _ = token_logprobs(trainer.model, micro_batch, temperature, float32_head=False)
        for row, logprob in zip(micro_batch.rows.tolist(), found.tolist(), strict=True):
            logprobs[row].append(logprob)
    return [
        msgspec.structs.replace(e, response=msgspec.structs.replace(e.response, logprobs=found))
        for e, found in zip(experiences, logprobs, strict=True)
    ]


def _published(trainer: Trainer) -> LeasedVersion:
    """The trainer's weights as a relay would lend them."""
    tensors = list(trainer.weights())
    entries = lay_out((TensorForm(name, "float32", tuple(tensor.shape)), "float32", 4) for name, tensor in tensors)
    data = bytearray(laid_out_bytes(entries))
    for entry, (_, tensor) in zip(entries, tensors, strict=True):
        data[entry.offset : entry.offset + entry.num_bytes] = tensor.contiguous().numpy().tobytes()
    manifest = Manifest(trainer.version, trainer.num_steps_done, len(data), len(data), entries, trainer.probe())
    return LeasedVersion(manifest, 0, memoryview(data))


async def _respond(engine: EmbeddedEngine, prompts: list[list[int]], seed: int) -> tuple[list[Response], list[bool]]:
    """GROUP_SIZE responses to each prompt, in order, and which of them the length limit cut."""
    requests = [
        Request(i, tuple(prompts[i // GROUP_SIZE]), RESPONSE_TOKENS_MAX, seed=seed * 10_000 + i)
        for i in range(len(prompts) * GROUP_SIZE)
    ]
    engine.submit(requests)
    responses = [Response([], [], [], []) for _ in requests]
    reasons: dict[int, str] = {}
    for _ in range(NUM_ENGINE_STEPS_MAX):
        for delta in await engine.next():
            response = responses[delta.request]
            response.token_ids += delta.token_ids
            response.logprobs += delta.logprobs
            response.loss_mask += [1] * len(delta.token_ids)
            if delta.stop_reason:
                reasons[delta.request] = delta.stop_reason
        if len(reasons) == len(requests):
            return responses, [reasons[i] == "length" for i in range(len(requests))]
    raise AssertionError(f"{len(requests) - len(reasons)} responses unfinished after {NUM_ENGINE_STEPS_MAX} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--loss", nargs="+", default=["grpo"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--recompute", action="store_true", help="overwrite the behaviour log-probs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| loss | staleness | seed | mean reward | of the last half | clipped | KL k3 |\n|---|---|---|---|---|---|---|"
    )
    for loss in options.loss:
        for staleness in options.staleness:
            for seed in options.seeds:
                run = StaleRun(make_config(seed=seed, loss=loss), staleness=staleness, recompute=options.recompute)
                steps = [run.step() for _ in range(options.steps)]
                name = f"{loss}, denominator recomputed" if options.recompute else loss
                print(f"| {name} | {staleness} | {seed} | {_row(steps)} |", flush=True)


def _row(steps: Sequence[Step]) -> str:
    late = steps[len(steps) // 2 :]
    means = [sum(step.reward for step in some) / len(some) for some in (steps, late)]
    clipped = sum(step.clip_fraction for step in late) / len(late)
    distance = sum(step.k3_kl for step in late) / len(late)
    return f"{means[0]:.3f} | {means[1]:.3f} | {clipped:.2%} | {distance:.4f}"


if __name__ == "__main__":
    main()
