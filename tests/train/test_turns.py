from laminar.control.messages import GroupId, TrajectoryId
from laminar.data.records import Experience, Response
from laminar.train.turns import turn_metrics


def experience(*mask: int) -> Experience:
    response = Response([7] * len(mask), [-1.0] * len(mask), list(mask), [1] * len(mask))
    return Experience(TrajectoryId(1), GroupId(1), (5,), response, 1.0, 1, truncated=False)


def test_turns_and_the_answers_of_tools_are_counted_in_the_mask():
    counted = turn_metrics([experience(1, 1, 0, 0, 1, 0, 1), experience(1, 1), experience(1, 0, 1), experience()])
    assert counted == {
        "num_turns/mean": 7 / 4,
        "num_turns/max": 3,
        "num_turns/min": 1,
        "tool_call_counts/mean": 3 / 4,
        "tool_call_counts/max": 2,
        "tool_call_counts/min": 0,
        "tool_call_counts/used_ratio": 0.5,
    }
