import asyncio
import threading
import time
from pathlib import Path

import pytest

from laminar.data.records import Problem
from laminar.envs.env import Environment, Observation, ObservationFailed, Turn, load_environment, observe

TWO_TURN = Path(__file__).parent / "two_turn.py"


def turn(num_turns=1):
    return Turn("2+2</code>", "so 2+2</code>", num_turns, "sums", "4", {"tool_output": 4})


def ask(environment, num_turns=1, timeout_s=5.0):
    return asyncio.run(observe(environment, turn(num_turns), timeout_s=timeout_s))


@pytest.mark.parametrize("name", ["TwoTurn", "AsyncTwoTurn"])
def test_an_environment_answers_or_ends_the_trajectory(name):
    environment = load_environment(f"{TWO_TURN}:{name}")
    assert ask(environment) == Observation(("", "<output>4</output>", ""))
    assert ask(environment, num_turns=2) is None


class Failing(Environment):
    def __init__(self, act):
        self.observe = act


async def sleep_for_ever(_):
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        (lambda _: 1 / 0, "Failing.observe raised ZeroDivisionError: division by zero"),
        (lambda _: 4, "Failing.observe returned int; expected text or None"),
        (lambda _: "", "Failing.observe returned empty text; None says that the trajectory is done"),
        (lambda _: time.sleep(0.5), "Failing.observe took more than 0.1 s"),
        (sleep_for_ever, "Failing.observe took more than 0.1 s"),
    ],
)
def test_every_failure_of_an_environment_is_named(act, cause):
    with pytest.raises(ObservationFailed, match=cause):
        ask(Failing(act), timeout_s=0.1 if "took" in cause else 30.0)


def test_a_timeout_of_the_environments_own_is_not_ours():
    def act(_):
        raise TimeoutError("the search engine sleeps")

    with pytest.raises(ObservationFailed, match="raised TimeoutError: the search engine sleeps"):
        ask(Failing(act))


def test_an_environment_that_hangs_is_in_nobody_s_way():
    """It cannot be ended, but the next turn has a thread of its own, however many hang."""

    async def hang_often():
        gate = threading.Event()
        hung = Failing(lambda _: gate.wait())
        asked = await asyncio.gather(*(observe(hung, turn(), timeout_s=0.2) for _ in range(60)), return_exceptions=True)
        answer = await observe(load_environment(f"{TWO_TURN}:TwoTurn"), turn(), timeout_s=5)
        gate.set()
        return asked, answer

    asked, answer = asyncio.run(hang_often())
    assert {type(outcome) for outcome in asked} == {ObservationFailed}
    assert answer is not None


def test_an_environment_that_ends_its_thread_is_named():
    def leave(_):
        raise SystemExit(3)

    with pytest.raises((ObservationFailed, SystemExit)):
        ask(Failing(leave))
    with pytest.raises(ObservationFailed, match="StopIteration"):
        ask(Failing(lambda _: next(iter(()))))


def test_a_slow_environment_does_not_block_the_others():
    async def both():
        slow = Failing(lambda _: time.sleep(0.3))
        begun = time.perf_counter()
        await asyncio.gather(*(observe(slow, turn(), timeout_s=5) for _ in range(3)))
        return time.perf_counter() - begun

    assert asyncio.run(both()) < 0.8


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("class Env(Environment): ...", "lacks observe"),
        ("class Env:\n    def observe(self, turn): ...", r"write `class Env\(Environment\)`"),
        (
            "class Env(Environment):\n    turn_ends = '</code>'\n    def observe(self, turn): ...",
            "must be a tuple of texts",
        ),
        (
            "class Env(Environment):\n    def __init__(self, x): ...\n    def observe(self, turn): ...",
            "raised TypeError",
        ),
        ("Env = 3", "is a int; it must be a class"),
        ("class Elsewhere: ...", "defines no 'Env'"),
    ],
)
def test_a_class_that_is_no_environment_is_told_what_it_lacks(tmp_path, content, cause):
    file = tmp_path / "my_env.py"
    file.write_text(f"from laminar.envs.env import Environment\n{content}")
    with pytest.raises(ValueError, match=cause) as caught:
        load_environment(f"{file}:Env")
    assert "rollout.environment=" in str(caught.value)


def test_what_an_environment_does_not_say_has_a_default():
    environment = load_environment(f"{TWO_TURN}:AsyncTwoTurn")
    assert (environment.turn_ends, environment.repeatable, environment.uses_sandbox) == ((), True, False)
    problem = Problem([{"role": "user", "content": "2+2?"}], "sums", "4", {})
    assert environment.first_messages(problem) == problem.prompt
    assert environment.score("sums", "Answer: 4", "4", {})["score"] == 1.0
    assert load_environment("math_with_code").uses_sandbox
