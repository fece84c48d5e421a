"""Measures the embedded engine, through its protocol, beside Hugging Face `generate` in static batches.

The model is the 3.08 M-parameter Qwen2 shape with random weights. Every response is forced to its length. The engine
is handed the whole list of requests with as many slots as the batch; `generate` takes the same list in static batches,
each of which runs to its longest response, and only tokens that were asked for count. Both run on one thread, one
after the other in every round, so that a busy machine slows both; the ratio is the median of the rounds'.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from laminar.config import EmbeddedEngineConfig
from laminar.relay.manifest import LeasedVersion, Manifest, Probe, TensorEntry
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.engine import Request

PROMPT_TOKENS = 23
EQUAL_TOKENS = 49
"""The mean of the quickstart's lengths."""
NUM_REQUESTS = {1: 16, 8: 32, 64: 128}
NUM_ROUNDS = 5
VOCAB_SIZE = 512


class Measurement(msgspec.Struct, frozen=True):
    """batch: engine slots, and responses in a static batch. lengths: "quickstart" (long-tailed) or "equal"."""

    batch: int
    lengths: str
    tokens_per_s: float
    hf_tokens_per_s: float
    ratio: float
    num_rounds: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="laminar bench engine", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a measurement")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="repetitions, of which the median counts")
    parser.add_argument("--batch", type=int, choices=sorted(NUM_REQUESTS), help="only this batch")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for batch in [options.batch] if options.batch else sorted(NUM_REQUESTS):
            for lengths in ("quickstart", "equal"):
                measurement = _measure(model, Path(folder), batch, lengths, options.rounds)
                sys.stdout.write(_format(measurement, as_json=options.json) + "\n")
                sys.stdout.flush()
    return 0


def _measure(model: Qwen2ForCausalLM, folder: Path, batch: int, lengths: str, num_rounds: int) -> Measurement:
    requests = _make_requests(NUM_REQUESTS[batch], lengths)
    num_tokens = sum(request.num_new_tokens_max for request in requests)
    config = EmbeddedEngineConfig(num_slots=batch, kv_capacity_tokens=max(1024, 512 * batch))
    engine = EmbeddedEngine(config, folder, stop_token_ids=())
    asyncio.run(engine.load(publish(model)))
    asyncio.run(_decode_all(engine, requests[:batch]))
    _generate_static(model, requests[:1], batch)
    rounds = [
        (asyncio.run(_decode_all(engine, requests)), _generate_static(model, requests, batch))
        for _ in range(num_rounds)
    ]
    return Measurement(
        batch=batch,
        lengths=lengths,
        tokens_per_s=round(num_tokens / statistics.median(ours_s for ours_s, _ in rounds), 1),
        hf_tokens_per_s=round(num_tokens / statistics.median(hf_s for _, hf_s in rounds), 1),
        ratio=round(statistics.median(hf_s / ours_s for ours_s, hf_s in rounds), 3),
        num_rounds=num_rounds,
    )


async def _decode_all(engine: EmbeddedEngine, requests: Sequence[Request]) -> float:
    """Seconds from submission to the last delta."""
    num_left, num_tokens = len(requests), 0
    started_s = time.perf_counter()
    engine.submit(requests)
    while num_left:
        for delta in await engine.next():
            num_tokens += len(delta.token_ids)
            num_left -= delta.stop_reason is not None
    elapsed_s = time.perf_counter() - started_s
    assert num_tokens == sum(request.num_new_tokens_max for request in requests)
    return elapsed_s


@torch.inference_mode()
def _generate_static(model: Qwen2ForCausalLM, requests: Sequence[Request], batch: int) -> float:
    started_s = time.perf_counter()
    for start in range(0, len(requests), batch):
        members = requests[start : start + batch]
        model.generate(  # pyright: ignore[reportAttributeAccessIssue] - transformers' protocol rejects its own models
            torch.tensor([member.token_ids for member in members]),
            attention_mask=torch.ones(len(members), PROMPT_TOKENS, dtype=torch.long),
            max_new_tokens=max(member.num_new_tokens_max for member in members),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
    return time.perf_counter() - started_s


def _make_requests(num_requests: int, lengths: str) -> list[Request]:
    """The quickstart's responses: n = clip(round(3 * exp(N(0, 1))), 1, 32) steps of 9 tokens, and 6 for the answer."""
    rng = random.Random(0)
    requests: list[Request] = []
    for index in range(num_requests):
        num_steps = min(32, max(1, round(3 * rng.lognormvariate(0.0, 1.0))))
        requests.append(
            Request(
                id=index,
                token_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)),
                num_new_tokens_max=9 * num_steps + 6 if lengths == "quickstart" else EQUAL_TOKENS,
                seed=index,
            )
        )
    return requests


def make_model(folder: Path) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def publish(model: Qwen2ForCausalLM) -> LeasedVersion:
    """The model's weights as a version that needs no relay."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    data = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in tensors.items():
        entries.append(TensorEntry(name, "float32", tuple(tensor.shape), offset, 4 * tensor.numel()))
        offset += 4 * tensor.numel()
    ids = torch.arange(64)
    logprobs = model(ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1).gather(1, ids[1:].unsqueeze(1))
    probe = Probe(tuple(ids.tolist()), tuple(logprobs.squeeze(1).tolist()), tolerance=1e-4)
    manifest = Manifest(1, 1, len(data), len(data), tuple(entries), probe)
    return LeasedVersion(manifest, checksum=0, data=memoryview(data))


def _format(measurement: Measurement, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(msgspec.structs.asdict(measurement))
    return (
        f"batch {measurement.batch:3d}  {measurement.lengths:10s}  {measurement.tokens_per_s:8.0f} tokens/s  "
        f"generate {measurement.hf_tokens_per_s:8.0f} tokens/s  ratio {measurement.ratio:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
