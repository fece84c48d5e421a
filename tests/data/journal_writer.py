"""Writes reports to the journal argv[1] until it is killed, and says after each one that it is acknowledged."""

import sys
from itertools import count
from pathlib import Path

from laminar.control.messages import Finished, Score
from laminar.data.journal import Journal
from laminar.data.records import TokenDelta

TOKENS_PER_DELTA = 5


def token(trajectory: int, position: int) -> int:
    return trajectory * 1000 + position % 1000


def delta(trajectory: int, report: int) -> TokenDelta:
    positions = range(report * TOKENS_PER_DELTA, (report + 1) * TOKENS_PER_DELTA)
    ids = tuple(token(trajectory, position) for position in positions)
    return TokenDelta(trajectory, 0, positions[0], ids, (-0.5,) * len(ids), (1,) * len(ids), 3)


if __name__ == "__main__":
    journal = Journal(Path(sys.argv[1]))
    for report in count():
        marks = [Finished(1000 + report, 0, TOKENS_PER_DELTA, False)]
        # Of 16 trajectories, and of one that finishes at once.
        deltas = [*(delta(trajectory, report) for trajectory in range(16)), delta(1000 + report, 0)]
        journal.append(deltas, marks, [Score(1000 + report, 0, float(report))])
        sys.stdout.write(f"{report}\n")
        sys.stdout.flush()
