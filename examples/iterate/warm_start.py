"""Makes the quickstart's model from nothing in under two minutes: `python -m examples.iterate.warm_start OUT`.

Trains a byte-level BPE tokenizer and a Qwen2 of 117 thousand parameters on demonstrations: right ones first, then, in
the last fifth of the steps, ones whose results are often wrong. The model so knows how (its greedy answers are right)
but samples badly (fewer than half of its answers at temperature 1 are): RL has a noisy skill to sharpen.
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from examples.iterate.task import NUM_TIMES_MAX, Problem, compute_score, demo, make_problem

NUM_CORPUS_TEXTS = 4000
NUM_UPDATES = 700
PADDED_TOKENS_PER_UPDATE = 4096
NUM_DEMOS_PER_SORT = 1024
# Muon finds the arithmetic in a tenth of AdamW's updates, but only for matrices, and not above 0.02.
MUON_LEARNING_RATE = 0.015
ADAMW_LEARNING_RATE = 3e-3
UNIFORM_LENGTH_SHARE = 0.2
# Noise from the first update on leaves a model that never learns the facts.
NOISE_FROM = 0.8
NOISE_ERROR_RATE = 0.25
RESPONSE_TOKENS_MAX = 330
PRETOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2.5's split: words, single digits, runs of punctuation, white space."""
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<code>", "</code>", "<output>", "</output>"]
STOP, PADDING = "<|im_end|>", "<|endoftext|>"
IGNORED = -100


class Demo(NamedTuple):
    prompt: list[int]
    response: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    start = time.monotonic()
    rng = random.Random(arguments.seed)
    problems = [make_problem(rng) for _ in range(NUM_CORPUS_TEXTS)]
    tokenizer = build_tokenizer([problem.prompt + demo(problem, rng) for problem in problems])
    model = build_model(tokenizer, arguments.seed)
    train(model, tokenizer, rng)
    print(f"{model.num_parameters()} parameters, {NUM_UPDATES} updates, {time.monotonic() - start:.0f} s")
    for name, greedy in (("sampled at temperature 1", False), ("greedy", True)):
        print(f"accuracy, {name}: {accuracy(model, tokenizer, greedy=greedy):.3f}")
    save(model, tokenizer, arguments.out)


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Qwen2.5's tokenizer in miniature: all bytes and a few merges, so any text survives encoding and decoding."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRETOKEN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        min_frequency=20,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=STOP, pad_token=PADDING)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=0.05,
        eos_token_id=SPECIAL_TOKENS.index(STOP),
        pad_token_id=SPECIAL_TOKENS.index(PADDING),
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    hidden_matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in hidden_matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(
        hidden_matrices, lr=MUON_LEARNING_RATE, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"
    )
    adamw = torch.optim.AdamW(rest, lr=ADAMW_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    batches: list[list[Demo]] = []
    for update in range(1, NUM_UPDATES + 1):
        if not batches:
            error_rate = NOISE_ERROR_RATE if update > NOISE_FROM * NUM_UPDATES else 0.0
            batches = list(cut_by_length(draw_demos(tokenizer, rng, error_rate)))
            rng.shuffle(batches)
        for optimizer, learning_rate in ((muon, MUON_LEARNING_RATE), (adamw, ADAMW_LEARNING_RATE)):
            optimizer.param_groups[0]["lr"] = learning_rate * schedule(update)
            optimizer.zero_grad()
        loss(model, batches.pop()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()


def schedule(update: int) -> float:
    """Share of the learning rate: a short warm-up, constant, then down to a twentieth over the last two fifths."""
    warmup = min(1.0, update / 20)
    if update < 0.6 * NUM_UPDATES:
        return warmup
    return warmup * max(0.05, (NUM_UPDATES - update) / (0.4 * NUM_UPDATES))


def draw_demos(tokenizer: PreTrainedTokenizerFast, rng: random.Random, error_rate: float) -> list[Demo]:
    demos = []
    for _ in range(NUM_DEMOS_PER_SORT):
        # Log-normal lengths alone show too few long countdowns to generalise to them.
        num_times = rng.randint(1, NUM_TIMES_MAX) if rng.random() < UNIFORM_LENGTH_SHARE else None
        problem = make_problem(rng, num_times)
        prompt = encode(tokenizer, problem.prompt)
        demos.append(Demo(prompt, encode(tokenizer, demo(problem, rng, error_rate) + STOP)))
    return demos


def cut_by_length(demos: list[Demo]) -> Iterator[list[Demo]]:
    """Batches of demos of similar length, each at most PADDED_TOKENS_PER_UPDATE when padded."""
    batch: list[Demo] = []
    for each in sorted(demos, key=lambda each: each.num_tokens):
        if batch and each.num_tokens * (len(batch) + 1) > PADDED_TOKENS_PER_UPDATE:
            yield batch
            batch = []
        batch.append(each)
    yield batch


def loss(model: Qwen2ForCausalLM, batch: list[Demo]) -> Tensor:
    token_ids = padded([[*each.prompt, *each.response] for each in batch], 0)
    targets = padded([[IGNORED] * len(each.prompt) + each.response for each in batch], IGNORED)
    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)


def padded(rows: list[list[int]], filler: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, greedy: bool) -> float:
    """Share of 512 fresh problems answered correctly."""
    rng = random.Random(123)
    problems = [make_problem(rng) for _ in range(512)]
    return sum(score(problem, text) for problem, text in answers(model, tokenizer, problems, greedy)) / len(problems)


def score(problem: Problem, text: str) -> float:
    return compute_score("iterate", text, problem.answer)


def answers(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], greedy: bool
) -> Iterator[tuple[Problem, str]]:
    torch.manual_seed(123)
    sampling = GenerationConfig(
        do_sample=not greedy,
        top_k=None if greedy else 0,
        max_new_tokens=RESPONSE_TOKENS_MAX,
        eos_token_id=SPECIAL_TOKENS.index(STOP),
        pad_token_id=SPECIAL_TOKENS.index(PADDING),
    )
    # All prompts have the same number of tokens, so a batch needs no padding.
    prompts = torch.tensor([encode(tokenizer, problem.prompt) for problem in problems])
    for some, token_ids in zip(batched(problems, 64), prompts.split(64), strict=True):
        sequences = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids=token_ids, attention_mask=torch.ones_like(token_ids), generation_config=sampling
        )
        responses = sequences[:, token_ids.shape[1] :]
        yield from zip(some, tokenizer.batch_decode(responses, skip_special_tokens=True), strict=True)


def batched(problems: list[Problem], size: int) -> list[list[Problem]]:
    return [problems[begin : begin + size] for begin in range(0, len(problems), size)]


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text)


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=SPECIAL_TOKENS.index(STOP), pad_token_id=SPECIAL_TOKENS.index(PADDING)
    )
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
