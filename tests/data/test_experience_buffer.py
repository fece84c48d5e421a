import math

import pytest

from laminar.data.experience_buffer import ExperienceBuffer
from laminar.data.records import Experience, Prompt, Response

PROMPT = Prompt(0, (1, 2), "sums", "4", {})


def response(num_tokens=3, version=5):
    return Response(list(range(num_tokens)), [-1.0] * num_tokens, [1] * num_tokens, [version] * num_tokens)


def add(buffer, trajectory=7, *, prompt=PROMPT, answer=None, score=1.0, version=5, group=2, truncated=False):
    answer = response() if answer is None else answer
    buffer.add(trajectory, prompt, answer, score, version, group, truncated)


def test_experience_is_taken_in_the_order_asked_for_and_stays():
    buffer = ExperienceBuffer()
    for trajectory in (7, 8, 9):
        add(buffer, trajectory, score=float(trajectory))
    assert [e.score for e in buffer.take([9, 7])] == [9.0, 7.0]
    assert buffer.take([7]) == [Experience(7, 2, (1, 2), response(), 7.0, 5, False)]
    assert len(buffer) == 3


def test_forgotten_experience_is_gone_and_forgetting_again_is_no_error():
    buffer = ExperienceBuffer()
    add(buffer)
    buffer.forget([7, 8])
    buffer.forget([7])
    assert 7 not in buffer
    with pytest.raises(KeyError, match=r"trajectories \[7, 8\] are not in the experience buffer"):
        buffer.take([7, 8])


def test_adding_the_same_again_changes_nothing_and_another_is_refused():
    buffer = ExperienceBuffer()
    add(buffer)
    add(buffer)
    assert len(buffer) == 1
    with pytest.raises(ValueError, match="trajectory 7 is in the buffer already"):
        add(buffer, score=0.0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"answer": response(0)}, "has no tokens"),
        ({"score": math.nan}, "score nan is not a finite number"),
        ({"score": -math.inf}, "score -inf is not a finite number"),
        ({"answer": Response([1, 2], [-1.0, math.nan], [1, 1], [5, 5])}, "position 1: log-prob nan"),
        ({"answer": Response([1, 2], [-1.0], [1, 1], [5, 5])}, "2 tokens, 1 log-probs"),
        ({"version": 6}, "claims version 6; its oldest token is from 5"),
    ],
)
def test_what_must_not_be_trained_on_is_refused_by_name(change, complaint):
    buffer = ExperienceBuffer()
    with pytest.raises(ValueError, match=complaint) as caught:
        add(buffer, **change)
    assert "trajectory 7" in str(caught.value)
    assert len(buffer) == 0


def test_an_interrupted_trajectory_has_the_version_of_its_oldest_token():
    buffer = ExperienceBuffer()
    add(buffer, answer=Response([1, 2], [-1.0, -1.0], [1, 1], [5, 6]), version=5)
    assert buffer.take([7])[0].version == 5
