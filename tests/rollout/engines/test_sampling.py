"""How tokens are drawn from logits."""

import math

import numpy as np
import pytest
import torch

from laminar.rollout.engines.engine import Request
from laminar.rollout.engines.sampling import STRETCH, Noise, sample, uniforms

LARGEST_NOISE = 1 - 2.0**-52
RECORDED = 0.34329192209867343


def request(**fields) -> Request:
    return Request(id=0, token_ids=(1,), num_new_tokens_max=1, **fields)


def test_noise_depends_on_seed_and_position_alone():
    """However it is read: in order, from the middle, back and forth; a recorded value pins it across versions."""
    in_order = [Noise(42).at(position) for position in range(3 * STRETCH)]
    noise = Noise(42)
    assert [noise.at(position) for position in reversed(range(3 * STRETCH))] == in_order[::-1]
    assert uniforms(42, 0, 3 * STRETCH).tolist() == in_order
    assert in_order[0] == pytest.approx(RECORDED, abs=1e-15)


def test_noise_is_uniform_and_independent_across_seeds_and_positions():
    table = np.stack([uniforms(seed, 0, 512) for seed in range(512)])
    assert 0 <= table.min() < 1e-4
    assert 1 - 1e-4 < table.max() <= LARGEST_NOISE
    counts, _ = np.histogram(table, bins=64, range=(0, 1))
    expected = table.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi-square, 63 degrees of freedom, p = 2e-5
    for axis in (0, 1):
        neighbours = np.corrcoef(table.flatten(), np.roll(table, 1, axis=axis).flatten())[0, 1]
        assert abs(neighbours) < 0.01


def test_seeds_of_any_size_and_sign_are_taken():
    assert uniforms(2**64 + 3, 0, 4).tolist() == uniforms(3, 0, 4).tolist()
    assert uniforms(-1, 0, 4).tolist() != uniforms(1, 0, 4).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_drawn_frequencies_are_the_softmax_at_the_temperature(temperature):
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    num = 20_000
    noise = uniforms(7, 0, num).tolist()
    tokens, logprobs = sample(logits.expand(num, -1), [request(temperature=temperature)] * num, noise)
    expected = (logits.double() / temperature).softmax(0)
    counts = torch.bincount(torch.tensor(tokens), minlength=5)
    assert ((counts - num * expected) ** 2 / (num * expected)).sum() < 30  # chi-square, 4 degrees, p = 5e-6
    assert logprobs == pytest.approx(expected[tokens].log().tolist(), abs=1e-12)


@pytest.mark.parametrize("noise", [0.0, LARGEST_NOISE])
@pytest.mark.parametrize(
    ("fields", "allowed"),
    [({}, {1, 2, 3}), ({"top_k": 2}, {2, 3}), ({"top_p": 0.5}, {3}), ({"top_k": 3, "top_p": 0.9}, {2, 3})],
)
def test_the_ends_of_the_noise_draw_no_impossible_token(fields, allowed, noise):
    """Probabilities 0, 0.09, 0.24, 0.67, 0."""
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, 2.0, -torch.inf]])
    tokens, logprobs = sample(logits, [request(**fields)], [noise])
    assert tokens[0] == (max(allowed) if noise else min(allowed))
    assert math.isfinite(logprobs[0])


def test_rows_with_different_parameters_share_a_batch():
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    requests = [request(), request(temperature=0.0), request(temperature=0.3), request(top_k=1, temperature=5.0)]
    noise = [0.3, 0.6, 0.9, 0.99]
    together = sample(logits, requests, noise)
    alone = [sample(logits[i : i + 1], requests[i : i + 1], noise[i : i + 1]) for i in range(4)]
    assert together[0] == [tokens[0] for tokens, _ in alone]
    assert together[1] == pytest.approx([logprobs[0] for _, logprobs in alone])
    assert together[0][1] == logits[1].argmax()
    assert together[1][1] == pytest.approx(logits[1].log_softmax(0).max().item(), abs=1e-6)
    assert together[0][3] == logits[3].argmax()


def test_broken_logits_give_broken_logprobs_not_an_error():
    logits = torch.tensor([[0.0, math.nan, 1.0], [0.0, 1.0, 2.0]])
    _, logprobs = sample(logits, [request(), request()], [0.5, 0.5])
    assert math.isnan(logprobs[0])
    assert math.isfinite(logprobs[1])
