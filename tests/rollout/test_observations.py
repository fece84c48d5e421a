"""An observation as tokens: whole where it fits, cut inside its outputs where it does not, never over the room."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.envs.env import Observation
from laminar.rollout.observations import CUT_MARK, encode_observation


def encode(text):
    """A token for every two letters, so that what is cut must be encoded again."""
    return [ord(text[i]) for i in range(0, len(text), 2)]


def test_what_fits_is_encoded_as_a_whole():
    observation = Observation(("<", "body", ">"))
    assert encode_observation(observation, encode, num_tokens_max=3) == encode("<body>")


def test_an_output_that_is_too_long_keeps_its_ends_and_the_markup_around_it():
    texts: list[str] = []

    def note(text):
        texts.append(text)
        return encode(text)

    body = "".join(chr(0x4E00 + n) for n in range(1000))
    token_ids = encode_observation(Observation(("<open>", body, "<close>")), note, num_tokens_max=100)
    (chosen,) = {text for text in texts if encode(text) == token_ids}
    assert chosen.startswith("<open>" + body[:60])
    assert chosen.endswith(body[-60:] + "<close>")
    assert CUT_MARK in chosen
    assert 90 <= len(token_ids) <= 100


def test_each_output_gets_its_share():
    observation = Observation(("", "a" * 10, "|", "b" * 1000, ""))
    assert len(encode_observation(observation, encode, num_tokens_max=50)) <= 50
    text = "a" * 10 + "|"
    assert encode_observation(observation, encode, num_tokens_max=50)[:5] == encode(text)[:5]


def test_markup_that_does_not_fit_is_no_observation():
    assert encode_observation(Observation(("<" * 30, "x", ">" * 30)), encode, num_tokens_max=20) is None


def test_a_megabyte_costs_no_more_than_what_is_looked_at():
    """P38. Encoding all of it again and again would take seconds."""
    began_s = time.perf_counter()
    token_ids = encode_observation(Observation.of("x" * 10_000_000), encode, num_tokens_max=500)
    assert len(token_ids) <= 500
    assert time.perf_counter() - began_s < 1.0


@given(
    pieces=st.lists(st.text(max_size=60), min_size=1, max_size=7).filter(lambda p: len(p) % 2),
    room=st.integers(0, 40),
)
def test_it_is_never_over_the_room(pieces, room):
    token_ids = encode_observation(Observation(tuple(pieces)), encode, num_tokens_max=room)
    if token_ids is None:
        markup = sum(len(piece) for piece in pieces[::2])
        outputs = [piece for piece in pieces[1::2] if piece]
        assert len(encode("x" * (markup + len(CUT_MARK) * len(outputs)))) > room
    else:
        assert len(token_ids) <= room


def test_text_that_no_tokenizer_reads_is_named():
    def refuse(text):
        raise ValueError("not valid Unicode")

    with pytest.raises(ValueError, match="not valid Unicode"):
        encode_observation(Observation.of("x"), refuse, num_tokens_max=5)
