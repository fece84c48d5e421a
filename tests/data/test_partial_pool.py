import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.data import partial_pool
from laminar.data.partial_pool import PartialResponsePool
from laminar.data.records import Response, TokenDelta

TOKENS = tuple(range(100, 130))


def delta(start, stop, *, trajectory=7, attempt=0, tokens=TOKENS, version=3):
    """Tokens start..stop-1 of the response that `tokens` is."""
    ids = tokens[start:stop]
    return TokenDelta(trajectory, attempt, start, ids, tuple(-float(i) for i in ids), (1,) * len(ids), version)


def test_deltas_in_order_make_the_response():
    pool = PartialResponsePool()
    assert pool.apply(delta(0, 3))
    assert pool.apply(delta(3, 5, version=3))
    response = pool.response(7)
    assert response == Response([100, 101, 102, 103, 104], [-100.0, -101.0, -102.0, -103.0, -104.0], [1] * 5, [3] * 5)
    assert pool.num_tokens(7) == 5
    assert (len(pool), 7 in pool, pool.trajectories()) == (1, True, [7])


def test_a_trajectory_without_tokens_is_empty():
    pool = PartialResponsePool()
    assert pool.num_tokens(7) == 0
    assert pool.response(7) == Response()
    assert not pool.apply(delta(0, 0))
    assert 7 not in pool


def test_a_repeated_delta_changes_nothing():
    pool = PartialResponsePool()
    pool.apply(delta(0, 5))
    assert not pool.apply(delta(0, 5))
    assert not pool.apply(delta(2, 4))
    assert pool.num_tokens(7) == 5
    assert pool.num_repeated == 2


def test_an_overlap_that_agrees_adds_only_what_is_new():
    pool = PartialResponsePool()
    pool.apply(delta(0, 5))
    assert pool.apply(delta(3, 8))
    assert pool.response(7).token_ids == list(TOKENS[:8])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"token_ids": (104, 999)}, "position 5: token 999 contradicts 105"),
        ({"logprobs": (-104.0, -0.5)}, "position 5: log-prob -0.5 contradicts -105.0"),
        ({"loss_mask": (0, 1)}, "position 4: loss mask 0 contradicts 1"),
        ({"version": 4}, "position 4: version 4 contradicts 3"),
    ],
)
def test_an_overlap_that_disagrees_is_named_and_changes_nothing(change, what):
    pool = PartialResponsePool()
    pool.apply(delta(0, 6))
    wrong = {"token_ids": (104, 105), "logprobs": (-104.0, -105.0), "loss_mask": (1, 1), "version": 3} | change
    with pytest.raises(ValueError, match=f"trajectory 7, attempt 0, {what}"):
        pool.apply(TokenDelta(trajectory=7, attempt=0, start=4, **wrong))
    assert pool.response(7).token_ids == list(TOKENS[:6])


def test_a_hole_is_named():
    pool = PartialResponsePool()
    pool.apply(delta(0, 2))
    with pytest.raises(ValueError, match="trajectory 7, attempt 0: tokens 2 to 4 never came, but those from 5 on did"):
        pool.apply(delta(5, 6))
    with pytest.raises(ValueError, match="trajectory 8, attempt 1: tokens 0 to 4 never came"):
        pool.apply(delta(5, 6, trajectory=8, attempt=1))
    assert pool.num_tokens(7) == 2
    assert 8 not in pool


def test_a_malformed_delta_is_refused():
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs and 2 mask entries"):
        PartialResponsePool().apply(TokenDelta(7, 0, 0, (1, 2), (0.0,), (1, 1), 0))


def test_a_newer_attempt_goes_on_from_where_it_resumed():
    pool = PartialResponsePool()
    pool.apply(delta(0, 10))
    other = tuple(t + 1000 for t in TOKENS)
    assert pool.apply(delta(8, 12, attempt=1, tokens=other))
    assert pool.response(7).token_ids == [*TOKENS[:8], *other[8:12]]
    assert pool.attempt(7) == 1


def test_a_restart_begins_anew_under_its_own_version():
    pool = PartialResponsePool()
    pool.apply(delta(0, 10, version=3))
    pool.apply(delta(0, 2, attempt=1, version=5))
    assert pool.num_tokens(7) == 2
    assert pool.response(7).versions == [5, 5]


def test_an_older_attempt_is_late_and_ignored():
    pool = PartialResponsePool()
    pool.apply(delta(0, 4))
    pool.apply(delta(4, 6, attempt=1))
    assert not pool.apply(delta(4, 20))
    assert pool.num_tokens(7) == 6
    assert pool.num_late == 1


def test_what_a_rescued_trajectorys_former_replica_still_sends_is_late():
    """Even before the new attempt's first tokens, and with a hole: the replica was silent, and woke up."""
    pool = PartialResponsePool()
    pool.apply(delta(0, 6))
    pool.truncate_to(7, 6)
    assert not pool.apply(delta(6, 9))
    pool.truncate_to(7, 0)
    assert not pool.apply(delta(9, 12))
    assert pool.num_late == 2
    assert pool.apply(delta(0, 2, attempt=1))
    assert pool.apply(delta(2, 3, attempt=1))
    assert pool.num_tokens(7) == 3


def test_truncating_keeps_the_first_tokens():
    pool = PartialResponsePool()
    pool.apply(delta(0, 6))
    pool.truncate_to(7, 4)
    assert pool.response(7) == Response([100, 101, 102, 103], [-100.0, -101.0, -102.0, -103.0], [1] * 4, [3] * 4)
    with pytest.raises(ValueError, match="trajectory 7 has 4 tokens, so it cannot be cut to 5"):
        pool.truncate_to(7, 5)
    with pytest.raises(ValueError, match="trajectory 9 has 0 tokens"):
        pool.truncate_to(9, 1)
    pool.truncate_to(9, 0)


def test_a_forgotten_trajectory_stays_forgotten():
    pool = PartialResponsePool()
    pool.apply(delta(0, 6))
    pool.forget([7, 8])
    assert (len(pool), pool.num_tokens(7)) == (0, 0)
    assert not pool.apply(delta(6, 8))
    assert not pool.apply(delta(0, 2, trajectory=8))
    assert len(pool) == 0
    assert pool.num_late == 2


def test_the_memory_of_forgotten_trajectories_is_bounded(monkeypatch):
    monkeypatch.setattr(partial_pool, "NUM_FORGOTTEN_REMEMBERED", 3)
    pool = PartialResponsePool()
    pool.forget([1, 2, 3, 4])
    assert pool.apply(delta(0, 2, trajectory=1))
    assert not pool.apply(delta(0, 2, trajectory=4))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40))
def test_any_pieces_without_a_hole_make_a_beginning_of_the_response(pieces):
    pool = PartialResponsePool()
    for start, length in pieces:
        held = pool.num_tokens(7)
        piece = delta(start, min(30, start + length))
        if piece.token_ids and start > held:
            with pytest.raises(ValueError, match="never came"):
                pool.apply(piece)
        else:
            grew = pool.apply(piece)
            assert grew == (pool.num_tokens(7) > held)
    assert pool.response(7).token_ids == list(TOKENS[: pool.num_tokens(7)])
