import io
from pathlib import Path

import pytest

from laminar.observe import live_display
from laminar.observe.display import Display, PlainDisplay
from laminar.observe.history import History
from laminar.observe.live_display import LiveDisplay
from tests.control.fake_world import FakeWorld, make_config, make_plane

CONFIG = make_config(num_steps=4)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError


def show(display: Display, history: History) -> None:
    world, plane = FakeWorld(CONFIG, 0), make_plane(CONFIG)
    world.kill(1, 4.0)
    for now, event in world.events():
        commands = plane.handle(event, now)
        for command in commands:
            world.execute(command)
        history.observe(now, event, commands, plane.state)
        display.update(now, plane.state)
    display.close()


def test_plain_output_has_a_line_for_every_step_evaluation_and_incident():
    output, history = io.StringIO(), History()
    show(PlainDisplay(history, num_steps=4, output=output), history)
    lines = output.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/4", "2/4", "3/4", "4/4"]
    assert sum("held-out accuracy" in line for line in lines) == len(history.evaluations) == 3
    assert any("replica lost: replica 1 killed" in line for line in lines)


def test_the_live_table_has_a_row_for_every_replica():
    output, history = Terminal(), History()
    show(LiveDisplay(CONFIG, history, num_steps=4, output=output), history)
    shown = output.getvalue()
    for word in ("generating", "evaluating", "KV utilization", "step 4 of 4", "held-out", "replica lost"):
        assert word in shown


def test_the_live_table_is_drawn_at_most_twice_a_second_and_at_steps(monkeypatch: pytest.MonkeyPatch):
    output, history, times = Terminal(), History(), list[float]()
    true_render = live_display.render

    def counted(config, history, num_steps, now, state):
        times.append(now)
        return true_render(config, history, num_steps, now, state)

    monkeypatch.setattr(live_display, "render", counted)
    show(LiveDisplay(CONFIG, history, num_steps=4, output=output), history)
    assert len(times) <= 2 * times[-1] + len(history.steps) + 2
    assert all(step.ended_at_s in times for step in history.steps)


def test_a_display_that_fails_ends_itself_and_not_the_run(monkeypatch: pytest.MonkeyPatch):
    output, history = Terminal(), History()

    def broken(*_arguments: object) -> None:
        raise RuntimeError("no more ink")

    monkeypatch.setattr(live_display, "render", broken)
    show(LiveDisplay(CONFIG, history, num_steps=4, output=output), history)
    assert output.getvalue().count("no more ink") == 1
    assert len(history.steps) == 4


def test_a_reader_that_goes_away_does_not_end_the_run():
    history = History()
    show(PlainDisplay(history, num_steps=4, output=ClosedPipe()), history)
    assert len(history.steps) == 4


def test_rich_is_imported_only_for_a_terminal():
    source = (Path(live_display.__file__).parent / "display.py").read_text()
    assert "import rich" not in source
    assert "from rich" not in source
