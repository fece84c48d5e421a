"""Makes the model of the quickstart with a tool in about a minute: `python -m examples.calculator.warm_start OUT`.

Trains the quickstart's tokenizer and model on demonstrations that call the tool in half of their steps and do the
others in the head, wrong half of the time. The model so knows both ways, and that neither is better: that the tool is
always right is left for RL to find.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.calculator.task import Problem, compute_score, demo, make_problem
from examples.iterate.warm_start import (
    IGNORED,
    NUM_CORPUS_TEXTS,
    NUM_DEMOS_PER_SORT,
    STOP,
    Demo,
    build_model,
    build_tokenizer,
    cut_by_length,
    encode,
    padded,
    save,
)

NUM_UPDATES = 600
# As in the quickstart: Muon finds the arithmetic in a tenth of AdamW's updates, but not above 0.02.
MUON_LEARNING_RATE = 0.02
ADAMW_LEARNING_RATE = 3e-3
CODE_END, OUTPUT, OUTPUT_END = "</code>", "<output>", "</output>"
RESPONSE_TOKENS_MAX = 300


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
    reward, tool_use = accuracy(model, tokenizer)
    print(f"sampled at temperature 1: accuracy {reward:.3f}, share that calls the tool {tool_use:.3f}")
    save(model, tokenizer, arguments.out)


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
            batches = list(cut_by_length(draw_demos(tokenizer, rng)))
            rng.shuffle(batches)
        for optimizer, learning_rate in ((muon, MUON_LEARNING_RATE), (adamw, ADAMW_LEARNING_RATE)):
            optimizer.param_groups[0]["lr"] = learning_rate * schedule(update)
            optimizer.zero_grad()
        loss(model, tokenizer, batches.pop()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()


def schedule(update: int) -> float:
    """Share of the learning rate: a short warm-up, constant, then down to a twentieth over the last two fifths."""
    warmup = min(1.0, update / 20)
    if update < 0.6 * NUM_UPDATES:
        return warmup
    return warmup * max(0.05, (NUM_UPDATES - update) / (0.4 * NUM_UPDATES))


def draw_demos(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[Demo]:
    problems = [make_problem(rng) for _ in range(NUM_DEMOS_PER_SORT)]
    return [Demo(encode(tokenizer, p.prompt), encode(tokenizer, demo(p, rng) + STOP)) for p in problems]


def loss(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, batch: list[Demo]) -> Tensor:
    token_ids = padded([[*each.prompt, *each.response] for each in batch], 0)
    targets = padded([[IGNORED] * len(each.prompt) + own(tokenizer, each.response) for each in batch], IGNORED)
    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)


def own(tokenizer: PreTrainedTokenizerFast, response: list[int]) -> list[int]:
    """The response, with IGNORED where the environment writes."""
    output, output_end = encode(tokenizer, OUTPUT)[0], encode(tokenizer, OUTPUT_END)[0]
    labels, observed = list[int](), False
    for token_id in response:
        observed = observed or token_id == output
        labels.append(IGNORED if observed else token_id)
        observed = observed and token_id != output_end
    return labels


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> tuple[float, float]:
    """Over 256 fresh problems: the share answered correctly, and the share that called the tool."""
    torch.manual_seed(123)
    rng = random.Random(123)
    answered = [(problem, respond(model, tokenizer, problem)) for problem in (make_problem(rng) for _ in range(256))]
    reward = sum(compute_score("calculator", text, problem.answer) for problem, text in answered) / len(answered)
    return reward, sum(OUTPUT in text for _, text in answered) / len(answered)


def respond(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problem: Problem) -> str:
    """One response, sampled token by token; the tool is imitated, since all that is ever asked here is a sum."""
    stop, code_end = encode(tokenizer, STOP)[0], encode(tokenizer, CODE_END)[0]
    prompt = encode(tokenizer, problem.prompt)
    token_ids, cache, fed = list(prompt), None, list(prompt)
    while len(token_ids) < len(prompt) + RESPONSE_TOKENS_MAX:
        step = model(input_ids=torch.tensor([fed]), cache=cache, use_cache=True)
        token_id = int(torch.multinomial(step.logits[0, -1].softmax(-1), 1))
        cache, fed = step.past_key_values, [token_id]
        if token_id == stop:
            break
        if token_id == code_end:
            fed += encode(tokenizer, OUTPUT + calculate(str(tokenizer.decode(token_ids[len(prompt) :]))) + OUTPUT_END)
        token_ids += fed
    return str(tokenizer.decode(token_ids[len(prompt) :]))


def calculate(text: str) -> str:
    """The value of the expression after the last `<code>`, if it is one of the demonstrations' kind."""
    first, plus, second = text.rpartition("<code>(")[2].removesuffix(")%1000").partition("+")
    return str((int(first) + int(second)) % 1000) if plus and first.isdigit() and second.isdigit() else "error"


if __name__ == "__main__":
    main()
