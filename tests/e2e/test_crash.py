"""Three of the moments of `make crash`: a run killed with -9 at any time goes on as if nothing had been."""

from pathlib import Path

import pytest

from scripts.crash import crash, plan

pytestmark = pytest.mark.timeout(1800)


def test_a_run_killed_three_times_goes_on_without_a_seam(tmp_path: Path):
    kills = plan(3, seed=4)
    assert {kill.while_saving for kill in kills} == {True, False}
    outcomes = crash(tmp_path / "run", kills, print)
    assert len(outcomes) == 3
    same = [outcome.next_step_same for outcome in outcomes]
    assert False not in same
    assert True in same, "no step could be compared; choose another seed"
