import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laminar.data.chat import Opening
from laminar.data.datasets import DataSet, load_prompts
from laminar.data.prompt_pool import PromptPool


def verl_row(question="1+1?", answer="2", index=0):
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": index, "need_tools_kwargs": True},
    }


def encode(prompt):
    text = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
    return [ord(c) for c in text]


def write(file: Path, rows) -> Path:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file.write_text(json.dumps(rows))
    return file


def load(*files: Path, prompt_tokens_max=1000, **settings) -> DataSet:
    return load_prompts(files, encode=encode, prompt_tokens_max=prompt_tokens_max, **settings)


SUFFIXES = pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])


@SUFFIXES
def test_a_row_keeps_what_the_reward_function_needs(tmp_path, suffix):
    file = write(tmp_path / f"train{suffix}", [verl_row(), verl_row("2+2?", "4", index=1)])
    first, second = load(file).prompts
    assert (first.id, second.id) == (0, 1)
    assert second.token_ids == tuple(map(ord, "2+2?"))
    assert (second.data_source, second.ground_truth) == ("sums", "4")
    assert second.extra_info == {"split": "train", "index": 1, "need_tools_kwargs": True}


@SUFFIXES
def test_a_prompt_may_be_plain_text_in_another_column(tmp_path, suffix):
    row = verl_row()
    row["question"] = row.pop("prompt")[0]["content"]
    (prompt,) = load(write(tmp_path / f"train{suffix}", [row]), prompt_key="question").prompts
    assert prompt.token_ids == tuple(map(ord, "1+1?"))


def test_json_lines_may_be_called_json(tmp_path):
    file = tmp_path / "train.json"
    file.write_text(json.dumps(verl_row()) + "\n\n" + json.dumps(verl_row("2+2?")) + "\n")
    assert len(load(file).prompts) == 2


@pytest.mark.parametrize("index", [7, "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"])
def test_index_may_be_a_number_or_text(tmp_path, index):
    (prompt,) = load(write(tmp_path / "train.parquet", [verl_row(index=index)])).prompts
    assert prompt.extra_info["index"] == index


def test_extra_info_may_be_absent(tmp_path):
    row = verl_row()
    del row["extra_info"]
    assert load(write(tmp_path / "train.parquet", [row])).prompts[0].extra_info == {}


def test_prompt_ids_follow_the_order_of_files_and_rows(tmp_path):
    one = write(tmp_path / "b.parquet", [verl_row("b0"), verl_row("b1")])
    two = write(tmp_path / "a.jsonl", [verl_row("a0")])
    pool = PromptPool(load(one, two).prompts)
    assert [bytes(p.token_ids).decode() for p in pool] == ["b0", "b1", "a0"]
    assert [p.id for p in pool] == [0, 1, 2]
    assert len(pool) == 3


def test_an_unknown_prompt_is_named(tmp_path):
    pool = PromptPool(load(write(tmp_path / "a.jsonl", [verl_row()])).prompts)
    for id in (1, -1):
        with pytest.raises(KeyError, match=f"prompt {id} is not in the pool, whose ids are 0 to 0"):
            pool[id]


def test_files_with_different_schemas_can_be_read_together(tmp_path):
    """P46: other extra columns, other types of the same column."""
    one = write(tmp_path / "a.parquet", [verl_row(index=1)])
    two = write(tmp_path / "b.parquet", [verl_row(question="3?", index="x") | {"agent_name": "tool"}])
    assert [p.extra_info["index"] for p in load(one, two).prompts] == [1, "x"]


def test_metadata_of_another_data_set_library_release_is_no_obstacle(tmp_path):
    """P46: "Feature type 'List' not found"."""
    table = pa.Table.from_pylist([verl_row()])
    features = {"info": {"features": {"prompt": {"_type": "ListOfTomorrow"}}}}
    file = tmp_path / "train.parquet"
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), file)
    assert len(load(file).prompts) == 1


# ---------------------------------------------------------------------------------------------------- duplicates


def test_duplicates_are_counted_and_kept_by_default(tmp_path, caplog):
    """P34: a data set stored a hundred times over makes an epoch a hundred epochs."""
    rows = [verl_row(f"{n}+1?", str(n + 1)) for n in range(3)] * 100
    loaded = load(write(tmp_path / "train.parquet", rows))
    assert (len(loaded.prompts), loaded.num_duplicates, loaded.num_conflicting) == (300, 297, 0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "297 of 300 rows repeat an earlier prompt (3 different ones" in record.getMessage()
    assert "data.dedup=true" in record.getMessage()


def test_dedup_keeps_the_first_of_each_and_says_how_many_went(tmp_path, caplog):
    """P34."""
    rows = [verl_row("1+1?", "2", 0), verl_row("2+2?", "4", 1), verl_row("1+1?", "3", 2)]
    loaded = load(write(tmp_path / "train.parquet", rows), dedup=True)
    assert [p.extra_info["index"] for p in loaded.prompts] == [0, 1]
    assert [p.id for p in loaded.prompts] == [0, 1]
    assert (loaded.num_duplicates, loaded.num_conflicting) == (1, 1)
    assert "1 of 3 rows" in caplog.text
    assert "1 repeats with another ground truth" in caplog.text


def test_duplicates_are_found_across_files(tmp_path):
    one, two = (write(tmp_path / name, [verl_row()]) for name in ("a.parquet", "b.jsonl"))
    assert load(one, two, dedup=True).num_duplicates == 1


def test_without_duplicates_nothing_is_said(tmp_path, caplog):
    load(write(tmp_path / "train.parquet", [verl_row("a"), verl_row("b")]))
    assert caplog.records == []


# ------------------------------------------------------------------------------------------------------ too long


def test_prompts_too_long_are_left_out_and_counted(tmp_path, caplog):
    file = write(tmp_path / "train.parquet", [verl_row("a" * 11), verl_row("b" * 10)])
    loaded = load(file, prompt_tokens_max=10)
    assert [p.token_ids[0] for p in loaded.prompts] == [ord("b")]
    assert loaded.num_too_long == 1
    assert "1 of 2 rows left out" in caplog.text


def test_nothing_left_is_an_error_that_names_the_setting(tmp_path):
    with pytest.raises(ValueError, match=r"all 1 have more than data\.prompt_tokens_max=3 tokens"):
        load(write(tmp_path / "train.parquet", [verl_row()]), prompt_tokens_max=3)


# ------------------------------------------------------------------------------------------------------ bad files


def refusal(*files: Path, **settings) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        load(*files, **settings)
    return str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    assert refusal(tmp_path / "gone.parquet") == f"{tmp_path}/gone.parquet: no such file"
    assert "is a folder" in refusal(tmp_path)
    assert "data.train_files" in refusal()


def test_an_unknown_kind_of_file_is_refused_with_the_known_ones(tmp_path):
    file = tmp_path / "train.csv"
    file.write_text("a,b")
    assert ".parquet, .jsonl, .json" in refusal(file)


@SUFFIXES
def test_an_empty_file_is_named(tmp_path, suffix):
    file = tmp_path / f"train{suffix}"
    file.touch()
    assert refusal(file) == f"{file}: the file is empty"


def test_a_file_without_rows_is_named(tmp_path):
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([verl_row()]).slice(0, 0), file)
    assert refusal(file) == f"{file}: the file has no rows"


def test_an_unreadable_parquet_file_is_named(tmp_path):
    file = tmp_path / "train.parquet"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert f"{file}: not a readable parquet file" in refusal(file)


def test_a_parquet_file_cut_short_is_named(tmp_path):
    file = write(tmp_path / "train.parquet", [verl_row(str(n)) for n in range(500)])
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file}: not a readable parquet file" in refusal(file)


def test_broken_json_is_named_by_its_line(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(verl_row()) + "\n{oops\n")
    assert f"{file}, line 2: not JSON" in refusal(file)


def test_a_row_that_is_no_object_is_named(tmp_path):
    assert "row 1: a row must be an object" in refusal(write(tmp_path / "train.json", [verl_row(), 3]))


@SUFFIXES
def test_a_missing_column_is_named_with_those_found_and_the_nearest(tmp_path, suffix):
    row = verl_row()
    row["prompts"] = row.pop("prompt")
    message = refusal(write(tmp_path / f"train{suffix}", [row]))
    for part in ("train", " 0" if suffix != ".jsonl" else "line 1", "no column 'prompt'", "ability", "data.prompt_key"):
        assert part in message
    assert "did you mean 'prompts'?" in message


def test_a_missing_data_source_does_not_speak_of_the_prompt(tmp_path):
    row = verl_row()
    del row["data_source"]
    message = refusal(write(tmp_path / "train.parquet", [row]))
    assert "no column 'data_source'" in message
    assert "prompt_key" not in message
    assert "another schema" not in message


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_file_of_another_schema_is_told_how_to_convert(tmp_path, suffix):
    """P46: gsm8k as it comes."""
    message = refusal(write(tmp_path / f"gsm8k{suffix}", [{"question": "1+1?", "answer": "#### 2"}]))
    for part in ("no column 'prompt'", "found answer, question", "another schema", "reward_model={ground_truth}"):
        assert part in message


@pytest.mark.parametrize(
    ("change", "column", "found"),
    [
        ({"prompt": 3}, "prompt", "int: 3"),
        ({"prompt": []}, "prompt", "list: []"),
        ({"prompt": [{"role": "user", "content": ["image"]}]}, "prompt", "image"),
        ({"prompt": [{"role": "user"}]}, "prompt", "'role': 'user'"),
        ({"prompt": ["hello"]}, "prompt", "hello"),
        ({"data_source": 5}, "data_source", "int: 5"),
        ({"reward_model": "4"}, "reward_model", "str: '4'"),
        ({"reward_model": {"style": "rule"}}, "reward_model", "rule"),
        ({"reward_model": {"ground_truth": None}}, "reward_model", "None"),
        ({"extra_info": [1]}, "extra_info", "list: [1]"),
        ({"extra_info": {"index": [1]}}, "extra_info.index", "list: [1]"),
    ],
)
def test_a_wrong_type_is_named_by_file_row_and_column(tmp_path, change, column, found):
    """P46."""
    file = write(tmp_path / "train.json", [verl_row(), verl_row("x") | change])
    message = refusal(file)
    assert f"{file}, row 1, column {column!r}: expected" in message
    assert found in message


def test_a_long_value_is_shown_in_part(tmp_path):
    message = refusal(write(tmp_path / "train.json", [verl_row() | {"reward_model": "x" * 100_000}]))
    assert len(message) < 1000


def test_a_prompt_that_the_encoder_refuses_is_named(tmp_path):
    def no_system(prompt):
        raise ValueError("System role not supported")

    file = write(tmp_path / "train.parquet", [verl_row()])
    with pytest.raises(ValueError, match=r"train\.parquet, row 0, column 'prompt': System role not supported"):
        load_prompts([file], encode=no_system, prompt_tokens_max=10)


# ------------------------------------------------------------------------------------- first messages of an environment


def rows_file(tmp_path, *extra_infos):
    file = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "one"}], "data_source": "d", "reward_model": {"ground_truth": "1"}}
    file.write_text("\n".join(json.dumps(row | {"extra_info": extra}) for extra in extra_infos))
    return file


def test_an_environment_gives_the_first_messages_and_the_tools(tmp_path):
    """The prompt of duplicates may differ by what the environment makes of the rest of their rows."""
    told: list[tuple[object, tuple]] = []

    def encode_with(prompt, tools=()):
        told.append((prompt, tuple(tools)))
        return [len(told)]

    def open_problem(problem):
        tools = ({"name": "t"},) if problem.extra_info["tools"] else ()
        return Opening([{"role": "system", "content": "s"}, *problem.prompt], tools)

    file = rows_file(tmp_path, {"tools": True}, {"tools": False}, {"tools": True})
    loaded = load_prompts([file], encode=encode_with, prompt_tokens_max=9, open_problem=open_problem)
    assert [tools for _, tools in told] == [({"name": "t"},), ()]
    assert [prompt.token_ids for prompt in loaded.prompts] == [(1,), (2,), (1,)]
    assert loaded.num_duplicates == 1


def test_a_row_that_the_environment_refuses_is_named(tmp_path):
    def refuse(problem):
        raise ValueError("extra_info.tools_kwargs names 'search'")

    file = rows_file(tmp_path, {})
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: extra_info\.tools_kwargs names 'search'"):
        load_prompts([file], encode=encode, prompt_tokens_max=9, open_problem=refuse)
