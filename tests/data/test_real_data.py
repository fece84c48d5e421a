"""Published data sets, as they are; skipped where their files are not beside the project."""

import time
from pathlib import Path

import pytest

from laminar.data.chat import chat_encoder, load_tokenizer
from laminar.data.datasets import load_prompts

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
LOAD_CPU_S_MAX = 10.0


@pytest.fixture
def encode():
    return chat_encoder(load_tokenizer(ROOT / "examples" / "iterate" / "warm"))


def existing(name: str) -> Path:
    file = DATA / name
    if not file.exists():
        pytest.skip(f"{file} is not there")
    return file


def test_all_prompts_of_dapo_load_in_10_seconds_and_its_duplicates_are_counted(encode, caplog):
    file = existing("dapo_math_17k/dapo_math_17k.parquet")
    began_s = time.process_time()  # a busy machine makes the clock on the wall no measure
    loaded = load_prompts([file], encode=encode, prompt_tokens_max=10_000)
    assert time.process_time() - began_s <= LOAD_CPU_S_MAX
    assert (loaded.num_rows, len(loaded.prompts), loaded.num_too_long) == (17_917, 17_917, 0)
    assert loaded.num_duplicates == 17_917 - 17_290
    assert "repeat an earlier prompt (17290 different ones" in caplog.text
    assert all(isinstance(prompt.ground_truth, str) and prompt.token_ids for prompt in loaded.prompts)


def test_dapo_without_its_duplicates_and_its_long_prompts(encode):
    file = existing("dapo_math_17k/dapo_math_17k.parquet")
    loaded = load_prompts([file], encode=encode, prompt_tokens_max=300, dedup=True)
    assert loaded.num_too_long > 0
    assert len(loaded.prompts) == 17_290 - loaded.num_too_long
    assert [prompt.id for prompt in loaded.prompts] == list(range(len(loaded.prompts)))


def test_gsm8k_as_published_is_refused_with_the_way_to_convert_it(encode):
    with pytest.raises(ValueError, match=r"line 1: no column 'prompt'; found answer, question.*convert it"):
        load_prompts([existing("gsm8k/train.jsonl")], encode=encode, prompt_tokens_max=512)


def test_a_schema_without_rewards_is_refused_by_its_missing_column(encode):
    with pytest.raises(ValueError, match=r"train.parquet, row 0: no column"):
        load_prompts([existing("verl_arith_seq/train.parquet")], encode=encode, prompt_tokens_max=512)
