"""Is the trainer's end of a run for the worker's tests: publishes perturbed weights through a true relay on loopback.

Every version's weights are kept, so that a trajectory can be replayed under the version that it claims.
"""

import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from laminar.config import Config
from laminar.control.messages import VersionComplete
from laminar.data.records import Experience
from laminar.relay.happenings import RelayHappening
from laminar.relay.lease import lease
from laminar.relay.manifest import LeasedVersion, Probe
from laminar.relay.publish import Publisher
from laminar.relay.relay import Relay
from laminar.train.trainer import Trainer
from tests.rollout.controller_end import Replica, ids_of
from tests.rollout.waiting import wait_until

TOKEN = b"the token of this test's run"
LEASE_DEADLINE_S = 2.0
LOGPROB_ERROR_MAX = 1e-4
NOISE = 0.02
"""Perturbation of each published version, in standard deviations of the tensor: log-probs move by some 0.1 nat."""


class TrainerEnd:
    def __init__(self, config: Config) -> None:
        self._run_id = f"test-{uuid.uuid4().hex[:12]}"
        self._temperature = config.rollout.temperature
        self._trainer = Trainer(config)
        self._weights: dict[int, dict[str, torch.Tensor]] = {}
        self._happenings: list[RelayHappening] = []
        self._random = torch.Generator().manual_seed(config.seed)
        self.relay = Relay(0, self._run_id, TOKEN, config.relay, self._happenings.append)
        self._publisher = Publisher(self._run_id, TOKEN, config.relay)
        self._publisher.set_master(self.relay.address, epoch=1)

    def publish(self, *, probe: Probe | None = None) -> int:
        """Perturb the weights and hand them over; returns the version. A probe that is given replaces the true one."""
        version = len(self._weights)
        self._perturb()
        self._weights[version] = {name: tensor.clone() for name, tensor in self._trainer.weights()}
        probe = probe or self._trainer.probe()
        self._publisher.hand_over(
            self._trainer.weights(), version=version, step=version, probe=probe, dtype=torch.float32
        )
        return version

    def publish_complete(self, *, probe: Probe | None = None) -> int:
        version = self.publish(probe=probe)
        wait_until(f"version {version} complete", lambda: version in self.complete())
        return version

    def probe(self) -> Probe:
        """Of the newest version."""
        return self._trainer.probe()

    def train(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """The first mini-batch of the first step on the newest version's weights."""
        self._trainer.version = len(self._weights) - 1
        return self._trainer.train_mini_batch(1, 0, experiences)

    def complete(self) -> list[int]:
        return [happening.version for happening in list(self._happenings) if isinstance(happening, VersionComplete)]

    def lease(self, version: int) -> AbstractContextManager[LeasedVersion]:
        return lease(self._run_id, 0, TOKEN, version, LEASE_DEADLINE_S)

    def replay_error(self, experience: Experience) -> float:
        """Largest difference between its log-probs and those by transformers under the version that it claims."""
        sampled = torch.tensor(experience.response.loss_mask, dtype=torch.bool)
        return self._logprob_errors(experience, experience.version)[sampled].max().item()

    def replay_error_by_segment(self, experience: Experience) -> float:
        """As replay_error, each token under the version that it claims itself."""
        versions = torch.tensor(experience.response.versions)
        sampled = torch.tensor(experience.response.loss_mask, dtype=torch.bool)
        return max(
            self._logprob_errors(experience, version)[sampled & (versions == version)].max().item()
            for version in sorted(set(experience.response.versions))
        )

    @torch.no_grad()
    def _logprob_errors(self, experience: Experience, version: int) -> torch.Tensor:
        """[num_response_tokens], against transformers under the version."""
        prompt, response = experience.prompt_token_ids, experience.response
        inputs = {"input_ids": torch.tensor([[*prompt, *response.token_ids]])}
        weights = self._weights[version]
        logits = torch.func.functional_call(self._trainer.model, weights, (), inputs).logits[0, len(prompt) - 1 : -1]
        distribution = (logits / self._temperature).log_softmax(-1)
        expected = distribution.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
        return (expected - torch.tensor(response.logprobs)).abs()

    async def check_serves(self, replica: Replica, version: int) -> None:
        """What it samples now is of this version."""
        replica.generate(batch := replica.controller.dispatch(2))
        await replica.finish(batch)
        for experience in replica.controller.experiences(ids_of(batch)):
            assert experience.version == version
            assert self.replay_error(experience) < LOGPROB_ERROR_MAX

    def close(self) -> None:
        self._publisher.close()
        self.relay.close()

    @torch.no_grad()
    def _perturb(self) -> None:
        for parameter in self._trainer.model.parameters():
            noise = torch.randn(parameter.shape, generator=self._random)
            parameter.add_(NOISE * (parameter.std() + 1e-3) * noise)
