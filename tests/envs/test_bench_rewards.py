import asyncio

from laminar.bench.rewards import measure


def test_every_response_is_scored_or_counted_as_hung():
    result = asyncio.run(measure(num_responses=200))
    # The multiples of 100 hang, and they are even.
    assert (result["num_scored"], result["num_timeouts"], result["num_right"]) == (198, 2, 100)
