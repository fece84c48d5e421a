import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from laminar.data.chat import chat_encoder, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<s>{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}<s>assistant{% endif %}"
)
WORDS = ["<s>", "<unk>", "user", "assistant", "one", "two"]


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>")
    fast.chat_template = TEMPLATE
    return fast


def words_of(ids):
    return " ".join(WORDS[id] for id in ids)


def test_messages_end_where_the_assistant_begins(tokenizer):
    ids = chat_encoder(tokenizer)([{"role": "user", "content": "one"}])
    assert words_of(ids) == "<s> user one <s> assistant"


def test_without_a_template_the_contents_are_joined(tokenizer):
    tokenizer.chat_template = None
    messages = [{"role": "user", "content": "one "}, {"role": "user", "content": "two"}]
    assert words_of(chat_encoder(tokenizer)(messages)) == "one two"


def test_text_is_encoded_as_it_is(tokenizer):
    assert words_of(chat_encoder(tokenizer)("one two")) == "one two"


def test_messages_that_the_template_refuses_are_a_value_error(tokenizer):
    with pytest.raises(ValueError, match="refuses the messages: no system role"):
        chat_encoder(tokenizer)([{"role": "system", "content": "one"}])


def test_a_saved_tokenizer_loads_and_a_folder_without_one_is_named(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(tmp_path / "model")
    assert words_of(chat_encoder(loaded)("two")) == "two"
    with pytest.raises(ValueError, match=r"model\.path=.*gone is not a folder"):
        load_tokenizer(tmp_path / "gone")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_data_and_envs_import_nothing_heavy():
    check = (
        "import sys, laminar.data.chat, laminar.data.datasets, laminar.data.journal, laminar.data.partial_pool,"
        "laminar.data.experience_buffer, laminar.data.prompt_pool, laminar.envs.env, laminar.envs.rewards;"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_tools_are_told_by_the_template_and_refused_without_one(tokenizer):
    tokenizer.chat_template = "{% for t in tools %}<s> {{ t.name }} {% endfor %}" + TEMPLATE
    ids = chat_encoder(tokenizer)([{"role": "user", "content": "one"}], ({"name": "two"},))
    assert words_of(ids) == "<s> two <s> user one <s> assistant"
    with pytest.raises(ValueError, match="tools are told to the model by its tokenizer's chat template"):
        chat_encoder(tokenizer)("one", ({"name": "two"},))
