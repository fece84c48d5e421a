"""Builds a rollout worker from the configuration: its engine, its rules, its environment."""

from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from laminar.config import Config, EmbeddedEngineConfig, VllmEngineConfig
from laminar.control.messages import MachineId, ReplicaId
from laminar.data.chat import Chat, load_tokenizer
from laminar.data.tokens import text_decoder, text_encoder
from laminar.envs.env import Environment, Services, check_turn_ends, load_environment
from laminar.envs.sandbox.sandbox import Sandbox
from laminar.rollout.engines.engine import Engine
from laminar.rollout.episode import EpisodeRules
from laminar.rollout.worker import Lease, RolloutWorker, Turns


async def build_engine(config: Config) -> Engine:
    """An engine that is up; raises ValueError for settings that this machine cannot serve."""
    match config.engine:
        case EmbeddedEngineConfig():
            from laminar.rollout.engines.embedded import EmbeddedEngine  # torch, so only where something decodes

            return EmbeddedEngine(config.engine, config.model.path)
        case VllmEngineConfig():
            from laminar.rollout.engines.vllm_setup import start_vllm

            return await start_vllm(config.engine, config.model.path, num_tokens_max=config.num_trajectory_tokens_max)
        case _:
            assert_never(config.engine)


async def build_worker(
    replica: ReplicaId, machine: MachineId, config: Config, lease: Lease, sandbox: Sandbox
) -> RolloutWorker:
    import torch

    from laminar.rollout.engines.architecture import read_stop_token_ids

    torch.set_num_threads(1)
    turns = _build_turns(config, sandbox)
    stop_token_ids = tuple(read_stop_token_ids(config.model.path))
    if turns is not None:
        stop_token_ids += turn_end_ids(turns.environment, turns.encode)
    rules = EpisodeRules(
        response_tokens_max=config.data.response_tokens_max,
        stop_token_ids=stop_token_ids,
        num_turns_max=config.rollout.num_turns_max if turns is not None else 1,
        observation_tokens_max=config.rollout.observation_tokens_max,
        temperature=config.rollout.temperature,
    )
    evaluation_rules = msgspec.structs.replace(
        rules,
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        top_k=config.evaluation.top_k,
        evaluation=True,
    )
    return RolloutWorker(
        replica,
        machine,
        await build_engine(config),
        lease,
        rules=rules,
        evaluation_rules=evaluation_rules,
        report_interval_s=config.rollout.report_interval_s,
        turns=turns,
        move_kv=config.rollout.move_kv,
    )


def start_environment(config: Config, sandbox: Sandbox) -> Environment:
    """The environment that the configuration names, started. Raises ValueError for what is wrong with it."""
    assert config.rollout.environment is not None, "there is one to start"
    environment = load_environment(config.rollout.environment)
    environment.start(Services(config.rollout, Chat(load_tokenizer(config.model.path)), sandbox))
    check_turn_ends(environment, config.rollout.environment)
    turn_end_ids(environment, text_encoder(config.model.path))
    return environment


def turn_end_ids(environment: Environment, encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """The single token of each text that ends a turn. Raises ValueError for a text that is several tokens."""
    ids: list[int] = []
    for text in environment.turn_ends:
        encoded = encode(text)
        if len(encoded) != 1:
            raise ValueError(
                f"rollout.environment: turn_ends has {text!r}, which is {len(encoded)} tokens of this tokenizer; "
                "a turn must end with a single one (math_with_code: see rollout.tool_format)"
            )
        ids += encoded
    return tuple(ids)


def _build_turns(config: Config, sandbox: Sandbox) -> Turns | None:
    if config.rollout.environment is None:
        return None
    return Turns(
        start_environment(config, sandbox),
        config.rollout.environment_timeout_s,
        text_encoder(config.model.path),
        text_decoder(config.model.path, skip_special_tokens=False),
    )
