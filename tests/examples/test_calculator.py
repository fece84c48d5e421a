import json
import random
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.calculator import dataset
from examples.calculator.slow_tool import TIME_SCALE, latency_s
from examples.calculator.task import Problem, compute_score, demo, make_problem
from examples.calculator.warm_start import OUTPUT, own, respond
from laminar.settings import load_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "calculator"


def rows(split: str) -> list[dict]:
    return pq.read_table(FOLDER / "data" / f"{split}.parquet").to_pylist()


def test_prompt_and_answer_are_as_documented():
    problem = Problem(operand=351, x=829, num_times=2)
    assert problem.prompt == "f(x)=x+351 mod 1000. x=829. Apply f 2 times.\n"
    assert problem.answer == "531"


@pytest.mark.parametrize("seed", range(30))
def test_a_demo_is_right_if_it_only_calls_the_tool_and_carries_its_errors_on(seed):
    rng = random.Random(seed)
    problem = make_problem(rng)
    text = demo(problem, rng)
    steps = re.findall(r"\d:(?:<code>\()?(\d+)\+(\d+)(?:\)%1000</code><output>|=)(\d+)", text)
    assert len(steps) == problem.num_times
    assert [int(a) for a, _, _ in steps[1:]] == [int(result) for _, _, result in steps[:-1]]
    right = all((int(a) + int(b)) % 1000 == int(result) for a, b, result in steps)
    assert compute_score("calculator", text, problem.answer) == float(text.endswith(f"Answer: {problem.answer}"))
    if right:
        assert compute_score("calculator", text, problem.answer) == 1.0


def test_committed_files_are_what_the_script_writes(tmp_path):
    dataset.main(tmp_path)
    for split, num_rows in (("train", 1024), ("heldout", 256)):
        assert pq.read_table(tmp_path / f"{split}.parquet").to_pylist() == rows(split)
        assert len(rows(split)) == num_rows
    prompts = [row["prompt"][0]["content"] for split in ("train", "heldout") for row in rows(split)]
    assert len(set(prompts)) == len(prompts)


def test_rows_name_their_tool_as_verls_do():
    for row in rows("heldout"):
        answer = row["reward_model"]["ground_truth"]
        assert row["extra_info"]["need_tools_kwargs"] is True
        assert row["extra_info"]["tools_kwargs"] == {"code_interpreter": {"create_kwargs": {"ground_truth": answer}}}


def test_what_the_environment_writes_is_not_demonstrated():
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER / "warm")
    text = "2:<code>(829+351)%1000</code><output>180</output>1:180+351=531 \nAnswer: 531"
    labels = own(tokenizer, tokenizer.encode(text))
    assert tokenizer.decode([id for id in labels if id >= 0]) == text.replace("<output>180</output>", "")


def test_the_committed_model_is_small_and_its_tags_are_single_tokens():
    assert (FOLDER / "warm" / "model.safetensors").stat().st_size < 300_000
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "warm")
    generation = json.loads((FOLDER / "warm" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.chat_template is None
    for tag in ("<code>", "</code>", "<output>", "</output>"):
        assert len(tokenizer.encode(tag)) == 1


def test_the_committed_model_knows_both_ways_and_is_mostly_wrong():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER / "warm")
    model = Qwen2ForCausalLM.from_pretrained(FOLDER / "warm", dtype=torch.float32)
    rng = random.Random(3)
    problems = [make_problem(rng) for _ in range(64)]
    with torch.no_grad():
        texts = [respond(model, tokenizer, problem) for problem in problems]
    right = sum(compute_score("", text, p.answer) for text, p in zip(texts, problems, strict=True))
    assert 0.08 <= right / 64 <= 0.45
    assert 0.5 <= sum(OUTPUT in text for text in texts) / 64 <= 0.95


def test_the_configuration_fits_the_longest_problem():
    config = load_config(ROOT / "configs/quickstart_tools.yaml")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "warm")
    step = "8:<code>(829+951)%1000</code><output>780</output>"
    assert len(tokenizer.encode(step * 8 + "\nAnswer: 780<|im_end|>")) <= config.data.response_tokens_max
    assert max(len(tokenizer.encode(row["prompt"][0]["content"])) for row in rows("train")) <= (
        config.data.prompt_tokens_max
    )
    assert config.trainer.num_steps * config.batch.num_prompts_per_step <= len(rows("train"))


def test_the_slow_tool_is_as_slow_as_published():
    drawn = [latency_s((n + 0.5) / 10_000) / TIME_SCALE for n in range(10_000)]
    assert drawn == sorted(drawn)
    assert drawn[5_000] == pytest.approx(21, rel=0.05)
    assert drawn[9_900] == pytest.approx(395, rel=0.05)
    assert sum(drawn) / 10_000 == pytest.approx(51, rel=0.05)
    assert latency_s(0.0) >= 0
    assert latency_s(1 - 2**-53) / TIME_SCALE == pytest.approx(600, rel=0.01)
