"""Keeps on disk what a crash must not lose: tokens, finished marks and scores, one transaction a report.

append(report) ──► SQLite, WAL ──kill -9──► restore() ──► partial-response pool, finished marks, scores
                      ▲
forget(ids) ──────────┘  frees their pages for later reports, so the file grows to a high-water mark and stays there
"""

import fcntl
import os
import sqlite3
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from laminar.control.messages import Finished, Score, TrajectoryId
from laminar.data.partial_pool import PartialResponsePool
from laminar.data.records import TokenDelta

LAYOUT_VERSION = 1
WAL_PAGES_PER_CHECKPOINT = 4000
"""Pages (4 KiB) written between two moves of the log into the file; each costs an fsync, so not too often."""
WAL_BYTES_KEPT = 32 * 2**20
"""The log is cut back to this after such a move."""

_TABLES = """
CREATE TABLE tokens (
    trajectory INTEGER, attempt INTEGER, start INTEGER, delta BLOB NOT NULL,
    PRIMARY KEY (trajectory, attempt, start)
) WITHOUT ROWID;
CREATE TABLE finished (
    trajectory INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, num_tokens INTEGER NOT NULL, truncated INTEGER NOT NULL
);
CREATE TABLE scores (trajectory INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, score REAL NOT NULL);
"""
# A mark of an older attempt may arrive after one of a newer: the newest attempt holds.
_PUT_FINISHED = """
INSERT INTO finished VALUES (?, ?, ?, ?) ON CONFLICT (trajectory) DO UPDATE SET
attempt = excluded.attempt, num_tokens = excluded.num_tokens, truncated = excluded.truncated
WHERE excluded.attempt >= attempt
"""
_PUT_SCORE = """
INSERT INTO scores VALUES (?, ?, ?) ON CONFLICT (trajectory) DO UPDATE SET
attempt = excluded.attempt, score = excluded.score WHERE excluded.attempt >= attempt
"""


_Mark = TypeVar("_Mark", Finished, Score)


class JournalInUse(ValueError):
    """Another process writes this journal."""


class JournalCorrupt(ValueError):
    """The file is not a journal, or no longer a whole one."""


class Restored(msgspec.Struct):
    """What a journal held; `finished` and `scores` are those of each trajectory's newest attempt."""

    partial: PartialResponsePool
    finished: dict[TrajectoryId, Finished]
    scores: dict[TrajectoryId, Score]


class Journal:
    """The durable copy of the pools. What append() and forget() did survives `kill -9` once they return.

    After a loss of power the file is whole and may lack the last moments (synchronous=NORMAL). One process at a time;
    it is held by a lock that the system frees however the process ends.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = _lock(path)
        try:
            with self._corruption_named():
                self._connection = _connect(path)
        except BaseException:
            self._lock.close()
            raise

    def append(
        self,
        deltas: Iterable[TokenDelta] = (),
        finished: Iterable[Finished] = (),
        scores: Iterable[Score] = (),
    ) -> None:
        """Write one report, whole or not at all. `deltas`: those that PartialResponsePool.apply took in."""
        with self._connection as transaction:
            transaction.executemany(
                "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?)",
                [(d.trajectory, d.attempt, d.start, msgspec.msgpack.encode(d)) for d in deltas],
            )
            transaction.executemany(
                _PUT_FINISHED, [(f.trajectory, f.attempt, f.num_tokens, f.truncated) for f in finished]
            )
            transaction.executemany(_PUT_SCORE, [(s.trajectory, s.attempt, s.score) for s in scores])

    def forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        ids = [(trajectory,) for trajectory in trajectories]
        with self._connection as transaction:
            for table in ("tokens", "finished", "scores"):
                transaction.executemany(f"DELETE FROM {table} WHERE trajectory = ?", ids)

    def restore(self) -> Restored:
        """Rebuild what was written and not forgotten. Raises JournalCorrupt, naming the file, if it cannot be read."""
        with self._corruption_named():
            partial = self._restore_tokens()
            # A mark without tokens, or of an older attempt than the tokens, came late from a replica given up. The
            # former nobody would ever forget.
            with self._connection as transaction:
                for table in ("finished", "scores"):
                    transaction.execute(f"DELETE FROM {table} WHERE trajectory NOT IN (SELECT trajectory FROM tokens)")
            finished = {
                f.trajectory: f
                for f in self._rows("finished", "trajectory, attempt, num_tokens, truncated", Finished)
                if f.trajectory in partial and f.attempt >= partial.attempt(f.trajectory)
            }
            scores = {
                s.trajectory: s
                for s in self._rows("scores", "trajectory, attempt, score", Score)
                if s.trajectory in finished and s.attempt == finished[s.trajectory].attempt
            }
        return Restored(partial, finished, scores)

    def num_bytes(self) -> int:
        """Size on disk, the log included."""
        files = (self._path, self._path.with_name(self._path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        self._connection.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _restore_tokens(self) -> PartialResponsePool:
        partial = PartialResponsePool()
        query = "SELECT delta FROM tokens ORDER BY trajectory, attempt, start"
        for (encoded,) in self._connection.execute(query):
            partial.apply(msgspec.msgpack.decode(encoded, type=TokenDelta))
        return partial

    def _rows(self, table: str, columns: str, record: type[_Mark]) -> Iterator[_Mark]:
        for row in self._connection.execute(f"SELECT {columns} FROM {table} ORDER BY trajectory"):
            yield msgspec.convert(dict(zip(columns.split(", "), row, strict=True)), record, strict=False)

    @contextmanager
    def _corruption_named(self) -> Generator[None, None, None]:
        """SQLite's, msgspec's and the pool's complaints about what the file holds, as one that says what to do."""
        try:
            yield
        except (sqlite3.DatabaseError, msgspec.MsgspecError, ValueError) as error:
            raise JournalCorrupt(
                f"{self._path}: not a readable journal ({error}); move it away to go on from the checkpoint alone, "
                "which loses the responses finished since"
            ) from error


def _lock(path: Path) -> TextIOWrapper:
    """Hold the lock file beside the journal, our pid inside. The file stays: removing it would race with an opener."""
    lock = path.with_name(path.name + ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise JournalInUse(
            f"{path}: process {owner} is writing this journal; stop that run, or give this one another run_dir"
        ) from error
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES_PER_CHECKPOINT}")
    connection.execute(f"PRAGMA journal_size_limit={WAL_BYTES_KEPT}")
    layout = _scalar(connection, "PRAGMA user_version")
    if layout == 0 and _scalar(connection, "SELECT count(*) FROM sqlite_schema") == 0:
        connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={LAYOUT_VERSION}; COMMIT;")
    elif layout != LAYOUT_VERSION:
        raise sqlite3.DatabaseError(f"its layout is {layout}, this release reads {LAYOUT_VERSION}")
    if (verdict := _scalar(connection, "PRAGMA quick_check(1)")) != "ok":
        raise sqlite3.DatabaseError(verdict)


def _scalar(connection: sqlite3.Connection, query: str) -> Any:
    return connection.execute(query).fetchone()[0]
