import json
import shutil
from pathlib import Path

import pytest

from laminar.data.tokens import text_decoder, text_encoder

WARM = Path(__file__).parents[2] / "examples" / "iterate" / "warm"
TEXT = "f(x)=x-5 mod 10.\n04:6-5=1 <output>7</output>"


def test_ids_go_to_text_and_back_with_and_without_special_tokens():
    ids = text_encoder(WARM)(TEXT + "<|im_end|>")
    assert text_decoder(WARM, skip_special_tokens=False)(ids) == TEXT + "<|im_end|>"
    assert text_decoder(WARM, skip_special_tokens=True)(ids) == "f(x)=x-5 mod 10.\n04:6-5=1 7"


def test_what_the_file_says_of_inputs_of_a_fixed_size_changes_no_text(tmp_path):
    shutil.copy(WARM / "tokenizer.json", tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert text_encoder(tmp_path)(TEXT) == text_encoder(WARM)(TEXT)


def test_a_text_that_is_no_unicode_is_refused():
    with pytest.raises(ValueError, match=r"'7\\ud800' is not valid Unicode"):
        text_encoder(WARM)("7\ud800")


@pytest.mark.parametrize(("content", "message"), [(None, "has no tokenizer.json"), ("no json", "can be read")])
def test_a_folder_without_a_readable_tokenizer_is_refused_by_name(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}.* {message}"):
        text_encoder(tmp_path)
