import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.control.messages import GroupId, TrajectoryId
from laminar.data.records import Experience, Response
from laminar.train.packing import lay_out, num_trained_tokens, plan_micro_batches


def experience(prompt: list[int], response: list[int], mask: list[int] | None = None) -> Experience:
    mask = mask or [1] * len(response)
    logprobs = [-0.5 * k for k in range(len(response))]
    return Experience(
        TrajectoryId(1),
        GroupId(1),
        tuple(prompt),
        Response(response, logprobs, mask, [0] * len(response)),
        1.0,
        0,
        False,
    )


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_every_trajectory_is_in_one_micro_batch_within_the_budget(lengths, budget):
    plan = plan_micro_batches(lengths, budget)
    assert sorted(index for indices in plan for index in indices) == list(range(len(lengths)))
    assert all(len(indices) == 1 or sum(lengths[i] for i in indices) <= budget for indices in plan)


def test_trajectories_of_similar_length_go_together():
    assert plan_micro_batches([9, 1, 10, 2], 20) == [[1, 3, 0], [2]]
    assert plan_micro_batches([9, 1, 10, 2], 19) == [[1, 3, 0], [2]]
    assert plan_micro_batches([9, 1, 10, 2], 11) == [[1, 3], [0], [2]]


def test_each_target_is_predicted_from_the_position_before_it_and_there_is_no_padding():
    experiences = [experience([5, 6], [7, 8, 9]), experience([1, 2, 3], [4])]
    micro_batch = lay_out(experiences, [1, 0])
    assert micro_batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]
    assert micro_batch.runs == ((1, 4), (1, 5))
    assert micro_batch.predictors.tolist() == [2, 5, 6, 7]
    assert micro_batch.targets.tolist() == [4, 7, 8, 9]
    assert micro_batch.behaviour_logprobs.tolist() == [0.0, 0.0, -0.5, -1.0]
    assert micro_batch.rows.tolist() == [1, 0, 0, 0]


def test_neighbours_of_equal_length_are_one_run():
    experiences = [experience([1], [2] * length) for length in (1, 1, 3, 3, 3, 1)]
    assert lay_out(experiences, range(6)).runs == ((2, 2), (3, 4), (1, 2))


def test_tool_output_is_not_trained():
    masked = experience([5], [7, 8, 9, 10], [1, 0, 0, 1])
    assert lay_out([masked], [0]).targets.tolist() == [7, 10]
    assert num_trained_tokens(masked) == 2


def test_a_stop_token_that_is_also_the_padding_is_trained():
    stop = 0
    micro_batch = lay_out([experience([5], [7, stop]), experience([5, stop], [7, 8, stop])], [0, 1])
    assert micro_batch.targets.tolist() == [7, stop, 7, 8, stop]


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="trajectory 1 has an empty prompt"):
        lay_out([experience([], [7])], [0])
