"""Measures the update phase beside TRL's: the same completions, log-probs, tiny model and settings, one thread.

Lengths are skewed as the quickstart's are. Both make the step's optimizer updates, from prompt groups whose rewards all
differ, so that nothing is saved by leaving trajectories out. TRL pads as it does in its own loop, all completions of a
step to the longest, and is given the micro-batch size at which it is fastest; ours packs. Rounds alternate, so that a
busy machine slows both; the ratio is the median of the rounds'.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from laminar.bench.output import show
from laminar.config import BatchConfig, Config, DataConfig, ModelConfig, TrainerConfig
from laminar.control.messages import GroupId, TrajectoryId
from laminar.data.records import Experience, Response
from laminar.train.mini_batch import prepare
from laminar.train.packing import num_tokens
from laminar.train.trainer import Trainer

SHAPES: dict[str, dict[str, Any]] = {
    "quickstart": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2},
    "3m": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4},
}
VOCAB_SIZE = 512
PROMPT_TOKENS = 23
NUM_GROUPS, GROUP_SIZE, NUM_MINI_BATCHES = 16, 16, 4
RESPONSE_TOKENS_MAX = 320
MICRO_BATCH_TOKENS_MAX = 2048
TRL_ROWS = (4, 8, 16, 32, 64)
NUM_ROUNDS = 5
NUM_MEMBERS = NUM_GROUPS * GROUP_SIZE // NUM_MINI_BATCHES
"""Trajectories of a mini-batch."""


class Measurement(msgspec.Struct, frozen=True):
    """Tokens a second are useful ones, of prompts and responses; padded ones are what each lays out."""

    model: str
    num_parameters: int
    tokens_per_s: float
    trl_tokens_per_s: float
    ratio: float
    useful_tokens: int
    padded_tokens: int
    trl_padded_tokens: int
    trl_rows_per_micro_batch: int
    trl_version: str
    num_rounds: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="laminar bench trainer", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a measurement")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="repetitions, of which the median counts")
    parser.add_argument("--model", choices=SHAPES, default="quickstart", help="whose shape; weights are random")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    values = msgspec.structs.asdict(measure(options.model, options.rounds))
    show(values, as_json=options.json)
    return 0


def measure(shape: str, num_rounds: int) -> Measurement:
    """Raises ValueError where TRL is not installed."""
    try:
        trl_version = version("trl")
    except PackageNotFoundError as error:
        raise ValueError("TRL, which ours is measured beside, comes with an extra: pip install '.[dev]'") from error
    from laminar.bench.trl_update import TrlUpdate, trl_batch

    with tempfile.TemporaryDirectory() as folder:
        model = _make_model(shape, Path(folder) / "model")
        config = _make_config(Path(folder) / "model")
        experiences = _make_experiences(model)
        mini_batches = [experiences[begin : begin + NUM_MEMBERS] for begin in range(0, len(experiences), NUM_MEMBERS)]
        ours = Trainer(config)
        theirs = TrlUpdate(config, _make_tokenizer(), Path(folder) / "trl")
        whole = trl_batch(experiences, prepare(experiences, config, 0).advantages, filler=0)
        parts = [_rows_of(whole, begin) for begin in range(0, len(experiences), NUM_MEMBERS)]

        def our_step() -> None:
            step = ours.num_steps_done + 1
            for index, mini_batch in enumerate(mini_batches):
                ours.train_mini_batch(step, index, mini_batch)

        def trl_step(num_rows: int) -> None:
            for part in parts:
                theirs.update(part, num_rows)

        our_step()
        fastest_rows = min(TRL_ROWS, key=lambda num_rows: min(_seconds(lambda: trl_step(num_rows)) for _ in range(2)))
        rounds = [(_seconds(our_step), _seconds(lambda: trl_step(fastest_rows))) for _ in range(num_rounds)]
    useful = sum(map(num_tokens, experiences))
    return Measurement(
        model=shape,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokens_per_s=round(useful / statistics.median(our_s for our_s, _ in rounds), 1),
        trl_tokens_per_s=round(useful / statistics.median(trl_s for _, trl_s in rounds), 1),
        ratio=round(statistics.median(trl_s / our_s for our_s, trl_s in rounds), 3),
        useful_tokens=useful,
        padded_tokens=useful,
        trl_padded_tokens=whole["prompt_ids"].numel() + whole["completion_ids"].numel(),
        trl_rows_per_micro_batch=fastest_rows,
        trl_version=trl_version,
        num_rounds=num_rounds,
    )


def _seconds(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _rows_of(whole: dict[str, Tensor], begin: int) -> dict[str, Tensor]:
    """One mini-batch of what TRL laid out for the step."""
    part = {name: tensor[begin : begin + NUM_MEMBERS] for name, tensor in whole.items() if tensor.ndim}
    return {**part, "num_items_in_batch": part["tool_mask"].sum()}


def _make_experiences(model: Qwen2ForCausalLM) -> list[Experience]:
    """Random tokens as long as the quickstart's responses, with their log-probs, and a reward that differs in a group.

    n = clip(round(3 * exp(N(0, 1))), 1, 32) steps of 9 tokens, and 6 for the answer.
    """
    rng = random.Random(0)
    experiences: list[Experience] = []
    for index in range(NUM_GROUPS * GROUP_SIZE):
        length = 9 * min(32, max(1, round(3 * rng.lognormvariate(0.0, 1.0)))) + 6
        prompt, token_ids = ([rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (PROMPT_TOKENS, length))
        response = Response(token_ids, _logprobs(model, prompt, token_ids), [1] * length, [0] * length)
        id, group, score = TrajectoryId(index), GroupId(index // GROUP_SIZE), float(index % 2)
        experiences.append(Experience(id, group, tuple(prompt), response, score, 0, truncated=False))
    return experiences


@torch.no_grad()
def _logprobs(model: Qwen2ForCausalLM, prompt: list[int], token_ids: list[int]) -> list[float]:
    logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


def _make_model(shape: str, folder: Path) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **SHAPES[shape],
    )
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def _make_config(model: Path) -> Config:
    return Config(
        model=ModelConfig(path=model),
        data=DataConfig(train_files=(Path("unused.parquet"),), response_tokens_max=RESPONSE_TOKENS_MAX),
        batch=BatchConfig(num_prompts_per_step=NUM_GROUPS, group_size=GROUP_SIZE, num_mini_batches=NUM_MINI_BATCHES),
        trainer=TrainerConfig(learning_rate=1e-6, micro_batch_tokens_max=MICRO_BATCH_TOKENS_MAX),
    )


def _make_tokenizer() -> PreTrainedTokenizerFast:
    """TRL wants one for its padding id; no text is ever made into tokens."""
    tokenizer = Tokenizer(WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[PAD]")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
