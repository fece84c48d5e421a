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
    """The text as it stands: no special token is added, those written in it are recognised.

    The encoder raises ValueError for a text that no tokenizer can read: half of a surrogate pair is no character.
    """
    tokenizer = _load(model_path)
    # A file may say how inputs of a fixed size are made of texts; nothing is cut or filled up here.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> list[int]:
        try:
            return tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise ValueError(f"{text[:80]!r} is not valid Unicode, so it has no tokens") from error

    return encode


def _load(model_path: Path) -> Tokenizer:
    path = model_path / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"model.path={model_path} has no tokenizer.json; save the tokenizer as a fast one "
            "(AutoTokenizer.from_pretrained(path).save_pretrained(path))"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more precise
        raise ValueError(f"{path} is no tokenizer that can be read: {error}") from error
