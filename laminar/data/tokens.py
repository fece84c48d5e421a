"""Turns token ids into text and back where only that is needed, without importing transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer


def text_decoder(model_path: Path, *, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    """A reward function expects text without special tokens; an environment parses turns that they delimit."""
    tokenizer = _load(model_path)

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    return decode


def text_encoder(model_path: Path) -> Callable[[str], list[int]]:
    """The text as it stands: no special token is added, those written in it are recognised."""
    tokenizer = _load(model_path)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return encode


def _load(model_path: Path) -> Tokenizer:
    path = model_path / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"model.path={model_path} has no tokenizer.json; save the tokenizer as a fast one "
            "(AutoTokenizer.from_pretrained(path).save_pretrained(path))"
        )
    return Tokenizer.from_file(str(path))
