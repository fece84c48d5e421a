"""The simulated engine's rules once more, one decode step at a time and plainly: what it must agree with."""

from laminar.sim.step_cost import StepCost
from laminar.sim.workload import Response


class Held:
    def __init__(self, id: int, prompt_tokens: int, response: Response, num_tokens: int = 0) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.response = response
        self.num_tokens = num_tokens
        self.calls = list(response.calls)

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.num_tokens

    def blocks(self, size: int, more: int = 0) -> int:
        return -(-(self.context + more) // size)


class StepwiseEngine:
    def __init__(self, cost: StepCost, num_blocks: int, block_tokens: int, num_running_max: int, share: float) -> None:
        self.cost, self.num_blocks, self.size = cost, num_blocks, block_tokens
        self.num_running_max, self.share = num_running_max, share
        self.now_s = 0.0
        self.running: list[Held] = []
        self.waiting: list[Held] = []
        self.tools: list[tuple[float, int, Held]] = []
        self.finished: list[tuple[int, float]] = []
        self.prefill_s = 0.0
        self.num_preemptions = 0
        self.blocks_seen_max = 0

    def used(self, more: int = 0) -> int:
        return sum(held.blocks(self.size, more) for held in self.running)

    def submit(self, held: list[Held]) -> None:
        self.waiting += held
        self.between()

    def step(self) -> None:
        """One decode step, or a jump to the next tool's answer."""
        if not self.running:
            self.now_s = min(self.tools)[0]
        else:
            kv_tokens = sum(held.context for held in self.running)
            self.now_s += self.prefill_s + self.cost.steps_s(1, len(self.running), kv_tokens)
            self.prefill_s = 0.0
            for held in self.running:
                held.num_tokens += 1
        self.between()

    def between(self) -> None:
        # In the order of their admission, as the heap of the engine has it.
        for held in list(self.running):
            if held.calls and held.num_tokens == held.calls[0].at_token:
                self.running.remove(held)
                self.tools.append((self.now_s + held.calls.pop(0).latency_s, held.id, held))
            elif held.num_tokens == held.response.num_tokens:
                self.running.remove(held)
                self.finished.append((held.id, self.now_s))
        for entry in sorted(self.tools):
            if entry[0] <= self.now_s:
                self.tools.remove(entry)
                self.waiting.append(entry[2])
        preempted = False
        while self.running and self.used(1) > self.num_blocks:
            self.waiting.insert(0, self.running.pop())
            self.num_preemptions += 1
            preempted = True
        while not preempted and self.waiting and len(self.running) < self.num_running_max:
            head = self.waiting[0]
            if self.running and self.used(1) + head.blocks(self.size, 1) > int(self.num_blocks * self.share):
                break
            self.running.append(self.waiting.pop(0))
            self.prefill_s += self.cost.prefill_s(head.context)
        self.blocks_seen_max = max(self.blocks_seen_max, self.used())
