"""Pretends to be a continuous-batching engine, many decode steps at a time.

    submit ──► waiting ──admit──► running ──► finished          admit: first come first served, up to C_max of the KV
                  ▲                 │  │                        preempt: the youngest, when the blocks run out
                  ├────preempt──────┘  └─► at a tool
                  └────answer──────────────────┘

While nothing joins or leaves, a step's time is a closed form, so the engine jumps to the next step at which something
does: a trajectory stops, the KV blocks run out, a tool answers. The blocks that a jump takes are counted exactly: which
trajectories need a new block at a step depends only on their context modulo the block.
"""

import heapq
from collections import deque
from collections.abc import Iterable

import msgspec

from laminar.control.messages import TrajectoryId
from laminar.sim.step_cost import StepCost
from laminar.sim.workload import Response


class Sequence(msgspec.Struct, eq=False):
    """One trajectory in an engine. num_tokens: response tokens so far; next_call: its first tool call not yet made."""

    trajectory: TrajectoryId
    attempt: int
    prompt_tokens: int
    response: Response
    num_tokens: int = 0
    next_call: int = 0
    at_tool: bool = False
    admission: int = -1
    """Which admission it runs by; -1 while it does not run."""
    admitted_at_step: int = 0
    finished_at_s: float = 0.0

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.num_tokens

    @property
    def stops_at_token(self) -> int:
        """Where it leaves the batch: at its next tool call, or at its end."""
        calls = self.response.calls
        return calls[self.next_call].at_token if self.next_call < len(calls) else self.response.num_tokens


class Usage(msgspec.Struct):
    """What an engine did so far: integrals over time, and counts."""

    busy_s: float = 0.0
    kv_token_s: float = 0.0
    running_s: float = 0.0
    """Running trajectories, over time."""
    num_tokens: int = 0
    """Decoded, tokens lost with a dead replica included."""
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    num_preemptions: int = 0


class SimulatedEngine:
    """now_s is the end of its last whole step; what is asked of it takes effect between steps, as in a real one."""

    def __init__(
        self, cost: StepCost, *, num_blocks: int, block_tokens: int, num_running_max: int, kv_utilization_max: float
    ) -> None:
        self.now_s = 0.0
        self.usage = Usage()
        self.running: dict[TrajectoryId, Sequence] = {}
        """In the order of their admission."""
        self.waiting: deque[Sequence] = deque()
        self.blocks_used = 0
        self.finished: list[Sequence] = []
        """Since they were last taken."""
        self._cost = cost
        self._num_blocks = num_blocks
        self._num_blocks_admitted = int(num_blocks * kv_utilization_max)
        self._block_tokens = block_tokens
        self._num_running_max = num_running_max
        self._kv_tokens = 0
        self._step = 0
        self._num_admissions = 0
        self._stops: list[tuple[int, int, Sequence]] = []
        """(step, admission, sequence) of those that run; entries of former admissions are stale."""
        self._last_stop: int | None = None
        """The step at which the last of those that run stops; none: to be worked out."""
        self._by_residue = [0] * block_tokens
        """Running trajectories by (context - step) modulo the block."""
        self._at_tools: list[tuple[float, int, Sequence]] = []
        self._prefill_s = 0.0
        """Of those admitted since the last step; it lengthens the next one."""
        self._jump: tuple[int, float] | None = None
        """Steps to the next moment at which something changes, and their seconds; none: to be worked out."""

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_at_tools(self) -> int:
        return len(self._at_tools)

    @property
    def empty(self) -> bool:
        return not (self.running or self.waiting or self._at_tools)

    @property
    def kv_utilization(self) -> float:
        return self.blocks_used / self._num_blocks

    def tokens_of(self, sequence: Sequence) -> int:
        """Its response tokens by now."""
        return sequence.num_tokens + (self._step - sequence.admitted_at_step if sequence.admission >= 0 else 0)

    def next_moment_s(self) -> float:
        """When something changes next if nobody asks for anything; infinity: never."""
        if self.running:
            return self.now_s + self._next_jump()[1]
        return self._at_tools[0][0] if self._at_tools else float("inf")

    def ends_not_before_s(self) -> float:
        """A time before which it cannot be empty: whoever has most to decode needs at least a step alone for each."""
        if self.waiting:
            last = self.waiting[-1]
            num_steps = last.response.num_tokens - last.num_tokens
        else:
            if self._last_stop is None:
                live = [stop for stop, admission, sequence in self._stops if admission == sequence.admission]
                self._last_stop = max(live, default=self._step)
            num_steps = max(0, self._last_stop - self._step)
        return self.now_s + self._cost.steps_s(num_steps, 1, 0)

    def pause(self, seconds: float) -> None:
        """Stand still for so long, from the step under way on."""
        self.now_s += seconds
        self._jump = None

    def interrupt(self, at_s: float) -> float:
        """Give up the KV of all that run; they take their contexts in again, first of all. Returns when that was."""
        self._finish_step_under_way(at_s)
        interrupted = list(self.running.values())
        for sequence in interrupted:
            self._leave(sequence)
        self._last_stop = None
        self.waiting.extendleft(reversed(interrupted))
        self._between_steps()
        return self.now_s

    def submit(self, sequences: Iterable[Sequence], at_s: float) -> None:
        """They wait for their admission, behind those that already do."""
        self._finish_step_under_way(at_s)
        self.waiting.extend(sequences)
        self._between_steps()

    def release(self, trajectories: Iterable[TrajectoryId], at_s: float) -> list[Sequence]:
        """Let go of those that are still there, with their tokens so far; empty again, it stays at at_s."""
        self._finish_step_under_way(at_s)
        wanted = dict.fromkeys(trajectories)
        released = [self.running[id] for id in wanted if id in self.running]
        for sequence in released:
            self._leave(sequence)
        self._last_stop = None
        for queue in (self.waiting, [sequence for _, _, sequence in self._at_tools]):
            released += [sequence for sequence in queue if sequence.trajectory in wanted]
        self.waiting = deque(sequence for sequence in self.waiting if sequence.trajectory not in wanted)
        self._at_tools = [entry for entry in self._at_tools if entry[2].trajectory not in wanted]
        heapq.heapify(self._at_tools)
        self._between_steps()
        return released

    def take_finished(self) -> list[Sequence]:
        finished, self.finished = self.finished, []
        return finished

    def sequences(self) -> list[Sequence]:
        """All that have not finished."""
        return [*self.running.values(), *self.waiting, *(sequence for _, _, sequence in self._at_tools)]

    def advance(self, until_s: float) -> None:
        """Make all the steps that end by then."""
        while self.next_moment_s() <= until_s:
            if self.running:
                num_steps, seconds = self._next_jump()
                self._make_steps(num_steps, seconds)
            else:
                self.now_s = max(self.now_s, self._at_tools[0][0])
            self._between_steps()
        if not self.running:
            self.now_s = max(self.now_s, until_s)
            return
        seconds = until_s - self.now_s - self._prefill_s
        if seconds > 0 and (num_steps := self._cost.num_steps_in(seconds, len(self.running), self._kv_tokens)) > 0:
            num_left, _ = self._next_jump()
            num_steps = min(num_steps, num_left - 1)  # a rounding error must not skip what the jump leads to
            if num_steps > 0:
                self._make_steps(num_steps, self._seconds_of(num_steps))

    # ------------------------------------------------------------------------------------------------------ steps

    def _finish_step_under_way(self, at_s: float) -> None:
        self.advance(at_s)
        if self.running and self.now_s < at_s:
            self._make_steps(1, self._seconds_of(1))
            self._between_steps()

    def _next_jump(self) -> tuple[int, float]:
        if self._jump is None:
            num_steps = min(self._stops[0][0] - self._step, self._num_steps_of_blocks())
            assert num_steps > 0, "between steps, whoever stops has left and somebody was preempted"
            seconds = self._seconds_of(num_steps)
            if self._at_tools and (until_answer_s := self._at_tools[0][0] - self.now_s) < seconds:
                fitting_s = max(0.0, until_answer_s - self._prefill_s)
                num_steps = min(num_steps, 1 + self._cost.num_steps_in(fitting_s, len(self.running), self._kv_tokens))
                seconds = self._seconds_of(num_steps)
            self._jump = num_steps, seconds
        return self._jump

    def _seconds_of(self, num_steps: int) -> float:
        return self._prefill_s + self._cost.steps_s(num_steps, len(self.running), self._kv_tokens)

    def _make_steps(self, num_steps: int, seconds: float) -> None:
        num_running, usage = len(self.running), self.usage
        usage.busy_s += seconds
        usage.running_s += num_running * seconds
        usage.kv_token_s += (self._kv_tokens + num_running * (num_steps - 1) / 2) * seconds
        usage.num_tokens += num_running * num_steps
        self.blocks_used += self._blocks_of(num_steps)
        self._kv_tokens += num_running * num_steps
        self._step += num_steps
        self.now_s += seconds
        self._prefill_s = 0.0
        self._jump = None

    def _blocks_of(self, num_steps: int) -> int:
        """New blocks that so many steps take."""
        size, counts = self._block_tokens, self._by_residue
        cycles, rest = divmod(num_steps, size)
        num_blocks, first = cycles * len(self.running), -self._step % size
        for i in range(rest):
            num_blocks += counts[(first - i) % size]
        return num_blocks

    def _blocks_of_next_step(self) -> int:
        return self._by_residue[-self._step % self._block_tokens]

    def _num_steps_of_blocks(self) -> int:
        """How many steps the free blocks suffice for; at least as many as to the next stop if they suffice so far."""
        free, num_running, size = self._num_blocks - self.blocks_used, len(self.running), self._block_tokens
        to_stop = self._stops[0][0] - self._step
        if (to_stop // size + 1) * num_running <= free:
            return to_stop
        cycles, free = divmod(free, num_running)
        first = -self._step % size
        for i in range(size):
            free -= self._by_residue[(first - i) % size]
            if free < 0:
                return cycles * size + i
        return (cycles + 1) * size

    # ---------------------------------------------------------------------------------------------- between steps

    def _between_steps(self) -> None:
        """Let stop who has come to a stop, preempt if the next step lacks blocks, else admit."""
        self._jump = None
        self._drop_stale_stops()
        while self._stops and self._stops[0][0] <= self._step:
            self._stop(self._stops[0][2])
            self._drop_stale_stops()
        while self._at_tools and self._at_tools[0][0] <= self.now_s:
            _, _, sequence = heapq.heappop(self._at_tools)
            sequence.at_tool = False
            self.waiting.append(sequence)
        preempted = False
        while self.running and self._num_blocks - self.blocks_used < self._blocks_of_next_step():
            self._preempt()
            preempted = True
        if not preempted:
            self._admit()
        self._drop_stale_stops()

    def _drop_stale_stops(self) -> None:
        while self._stops and self._stops[0][1] != self._stops[0][2].admission:
            heapq.heappop(self._stops)

    def _stop(self, sequence: Sequence) -> None:
        self._leave(sequence)
        calls = sequence.response.calls
        if sequence.next_call < len(calls):
            call = calls[sequence.next_call]
            sequence.next_call += 1
            sequence.at_tool = True
            heapq.heappush(self._at_tools, (self.now_s + call.latency_s, sequence.trajectory, sequence))
        else:
            sequence.finished_at_s = self.now_s
            self.finished.append(sequence)

    def _preempt(self) -> None:
        youngest = next(reversed(self.running.values()))
        assert len(self.running) > 1, f"one trajectory alone needs more than {self._num_blocks} KV blocks"
        self._leave(youngest)
        self._last_stop = None
        self.waiting.appendleft(youngest)
        self.usage.num_preemptions += 1

    def _admit(self) -> None:
        """First come, first served, while the next step's blocks stay below C_max; one alone is always admitted."""
        if not self.waiting:
            return
        blocks_after_step = self.blocks_used + self._blocks_of_next_step()
        while self.waiting and len(self.running) < self._num_running_max:
            blocks_after_step += -(-(self.waiting[0].context_tokens + 1) // self._block_tokens)
            if self.running and blocks_after_step > self._num_blocks_admitted:
                return
            self._join(self.waiting.popleft())

    def _join(self, sequence: Sequence) -> None:
        """Into the batch; its context is taken in by the next step."""
        context = sequence.context_tokens
        self._num_admissions += 1
        sequence.admission, sequence.admitted_at_step = self._num_admissions, self._step
        self.running[sequence.trajectory] = sequence
        self.blocks_used += -(-context // self._block_tokens)
        self._kv_tokens += context
        self._by_residue[(context - self._step) % self._block_tokens] += 1
        stop = self._step + sequence.stops_at_token - sequence.num_tokens
        heapq.heappush(self._stops, (stop, sequence.admission, sequence))
        if self._last_stop is not None:
            self._last_stop = max(self._last_stop, stop)
        seconds = self._cost.prefill_s(context)
        self._prefill_s += seconds
        self.usage.prefill_s += seconds
        self.usage.prefill_tokens += context

    def _leave(self, sequence: Sequence) -> None:
        """Out of the batch, with its KV blocks."""
        residue = (sequence.context_tokens - sequence.admitted_at_step) % self._block_tokens
        sequence.num_tokens = self.tokens_of(sequence)
        sequence.admission = -1
        del self.running[sequence.trajectory]
        self.blocks_used -= -(-sequence.context_tokens // self._block_tokens)
        self._kv_tokens -= sequence.context_tokens
        self._by_residue[residue] -= 1
