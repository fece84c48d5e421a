"""Holds the payload of finished, scored trajectories until a checkpoint covers them; their order is control's."""

import math
from collections.abc import Iterable, Sequence

from laminar.control.messages import GroupId, TrajectoryId
from laminar.data.records import Experience, Prompt, Response


class ExperienceBuffer:
    def __init__(self) -> None:
        self._experiences: dict[TrajectoryId, Experience] = {}

    def __len__(self) -> int:
        return len(self._experiences)

    def __contains__(self, trajectory: TrajectoryId) -> bool:
        return trajectory in self._experiences

    def add(
        self,
        trajectory: TrajectoryId,
        prompt: Prompt,
        response: Response,
        score: float,
        version: int,
        group: GroupId,
        truncated: bool,
    ) -> None:
        """Store it; adding the same again changes nothing. The response is not copied: it must not change any more.

        Raises ValueError for what must never reach the trainer: no tokens, a score or log-prob that is no number, a
        version that is not the oldest of its tokens, or another experience under the same id.
        """
        _check(trajectory, response, score, version)
        experience = Experience(trajectory, group, prompt.token_ids, response, score, version, truncated)
        if self._experiences.setdefault(trajectory, experience) != experience:
            raise ValueError(f"trajectory {trajectory} is in the buffer already, with another response or score")

    def take(self, trajectories: Sequence[TrajectoryId]) -> list[Experience]:
        """These, in this order. They stay: "trained" is final only at a checkpoint, which then forgets them."""
        if missing := [trajectory for trajectory in trajectories if trajectory not in self._experiences]:
            raise KeyError(f"trajectories {missing} are not in the experience buffer")
        return [self._experiences[trajectory] for trajectory in trajectories]

    def forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Drop these; one that never came here (dropped before its score) is no error."""
        for trajectory in trajectories:
            self._experiences.pop(trajectory, None)


def _check(trajectory: TrajectoryId, response: Response, score: float, version: int) -> None:
    num_tokens = len(response.token_ids)
    if num_tokens == 0:
        raise ValueError(f"trajectory {trajectory} has no tokens; a failed one must be dropped by name, not trained")
    if not len(response.logprobs) == len(response.loss_mask) == len(response.versions) == num_tokens:
        raise ValueError(
            f"trajectory {trajectory}: {num_tokens} tokens, {len(response.logprobs)} log-probs, "
            f"{len(response.loss_mask)} mask entries, {len(response.versions)} versions; they must be as many"
        )
    if not math.isfinite(score):
        raise ValueError(f"trajectory {trajectory}: score {score} is not a finite number")
    for position, logprob in enumerate(response.logprobs):
        if not math.isfinite(logprob):
            raise ValueError(f"trajectory {trajectory}, position {position}: log-prob {logprob} is not finite")
    if min(response.versions) != version:
        raise ValueError(
            f"trajectory {trajectory} claims version {version}; its oldest token is from {min(response.versions)}"
        )
