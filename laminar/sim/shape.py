"""Works out the simulated cluster from its settings: GPUs to replicas and machines, memory to KV blocks, all the times.

Everything that a user can get wrong about it is a ValueError here, before anything is simulated.
"""

import msgspec

from laminar.config import (
    CoefficientsDecode,
    Config,
    DescribedModel,
    KnownModel,
    MeasuredDecode,
    SimulationConfig,
)
from laminar.sim.calibration import FITTED_ON_PARAMETERS, Calibration
from laminar.sim.links import formula_broadcast_s, published_broadcast_s
from laminar.sim.published import kernels, published
from laminar.sim.step_cost import Overhead, StepCost, from_coefficients, from_kernels

GPU_MEMORY_BYTES = {"h800": 80e9, "h100": 80e9, "h200": 141e9}
ACTIVATION_BYTES = 3.75e9
"""An engine keeps so much of every accelerator for activations and its own buffers."""
BYTES_PER_PARAMETER = 2


class ModelSize(msgspec.Struct, frozen=True):
    """size: its name in the measured tables; none: it is in none of them."""

    num_parameters: float
    num_layers: int
    kv_bytes_per_token: int
    size: str | None = None

    @property
    def weight_bytes(self) -> float:
        return BYTES_PER_PARAMETER * self.num_parameters


KNOWN_MODELS = {
    "qwen2.5-7b": ModelSize(7.62e9, 28, 57_344, "7B"),
    "qwen2.5-32b": ModelSize(32.76e9, 64, 262_144, "32B"),
    "qwen2.5-72b": ModelSize(72.7e9, 80, 327_680, "72B"),
}


class Split(msgspec.Struct, frozen=True):
    """colocated: trainer and replicas share all GPUs, one after the other."""

    num_train_gpus: int
    num_rollout_gpus: int
    colocated: bool = False


class Shape(msgspec.Struct, frozen=True):
    """The cluster as the world needs it. arrivals_s: when a version is in each machine's relay after the hand-over."""

    split: Split
    num_replicas: int
    num_machines: int
    cost: StepCost
    num_kv_blocks: int
    arrivals_s: tuple[float, ...]
    publish_s: float
    load_s: float
    train_s_per_token: float
    weight_bytes: float


def resolve(config: Config, calibration: Calibration, *, colocated: bool) -> Shape:
    simulation, model = config.simulation, _model(config.simulation)
    split = _split(simulation, colocated=colocated)
    num_replicas = split.num_rollout_gpus // simulation.tensor_parallel
    num_machines = min(num_replicas, -(-split.num_rollout_gpus // simulation.num_gpus_per_machine))
    weights, num_kv_blocks = simulation.weights, _num_kv_blocks(config, model)
    return Shape(
        split,
        num_replicas,
        num_machines,
        _step_cost(simulation, model, calibration),
        num_kv_blocks,
        tuple(_broadcast_s(config, model, position) for position in range(1, num_machines + 1)),
        model.weight_bytes / weights.publish_bytes_per_s,
        model.weight_bytes / weights.load_bytes_per_s,
        _train_s_per_token(simulation, model, calibration, split.num_train_gpus),
        model.weight_bytes,
    )


def _model(simulation: SimulationConfig) -> ModelSize:
    match simulation.model:
        case KnownModel():
            return KNOWN_MODELS[simulation.model.name]
        case DescribedModel() as described:
            return ModelSize(described.num_parameters, described.num_layers, described.kv_bytes_per_token)


def _split(simulation: SimulationConfig, *, colocated: bool) -> Split:
    num_gpus, tensor_parallel = simulation.num_gpus, simulation.tensor_parallel
    if colocated:
        split = Split(num_gpus, num_gpus, colocated=True)
    else:
        num_train = num_gpus // 2 if simulation.num_train_gpus is None else simulation.num_train_gpus
        split = Split(num_train, num_gpus - num_train)
    if split.num_rollout_gpus <= 0 or split.num_train_gpus <= 0:
        raise ValueError(
            f"simulation.num_train_gpus={split.num_train_gpus} leaves {split.num_rollout_gpus} of simulation.num_gpus="
            f"{num_gpus} to generate; both must have some: change the split"
        )
    if split.num_rollout_gpus < tensor_parallel:
        raise ValueError(
            f"{split.num_rollout_gpus} of simulation.num_gpus={num_gpus} generate, fewer than simulation."
            f"tensor_parallel={tensor_parallel}, so there would be no replica; lower it or simulation.num_train_gpus"
        )
    if split.num_rollout_gpus % tensor_parallel:
        raise ValueError(
            f"{split.num_rollout_gpus} of simulation.num_gpus={num_gpus} generate, which is no multiple of simulation."
            f"tensor_parallel={tensor_parallel}; change simulation.num_train_gpus or the tensor parallelism"
        )
    return split


def _num_kv_blocks(config: Config, model: ModelSize) -> int:
    simulation = config.simulation
    of_gpu = GPU_MEMORY_BYTES[simulation.accelerator] * simulation.gpu_memory_share - ACTIVATION_BYTES
    kv_bytes = of_gpu * simulation.tensor_parallel - model.weight_bytes
    num_blocks = int(max(0.0, kv_bytes) / model.kv_bytes_per_token) // simulation.block_tokens
    longest = config.data.prompt_tokens_max + config.data.response_tokens_max
    if num_blocks * simulation.block_tokens < longest:
        needed = "nothing" if num_blocks == 0 else f"room for {num_blocks * simulation.block_tokens:,} tokens"
        raise ValueError(
            f"the model's {model.weight_bytes / 1e9:.1f} GB of weights on simulation.tensor_parallel="
            f"{simulation.tensor_parallel} {simulation.accelerator} leave {needed} for the KV cache, and one "
            f"trajectory may take data.prompt_tokens_max + data.response_tokens_max = {longest:,}; raise "
            "simulation.tensor_parallel or simulation.gpu_memory_share"
        )
    return num_blocks


def _step_cost(simulation: SimulationConfig, model: ModelSize, calibration: Calibration) -> StepCost:
    match simulation.decode:
        case CoefficientsDecode() as decode:
            return from_coefficients(decode, num_running_max=simulation.num_running_max)
        case MeasuredDecode():
            if model.size is None:
                raise ValueError(
                    "simulation.model.kind=described has no step times on record; give those of your replicas with "
                    "simulation.decode.kind=coefficients (a run's ReplicaStarted events have them)"
                )
            return from_kernels(
                kernels(),
                published(),
                accelerator=simulation.accelerator,
                size=model.size,
                tensor_parallel=simulation.tensor_parallel,
                num_layers=model.num_layers,
                overhead=Overhead(
                    per_layer_s=calibration.engine_per_layer_s, per_running_s=calibration.engine_per_running_s
                ),
                num_running_max=simulation.num_running_max,
            )


def _broadcast_s(config: Config, model: ModelSize, position: int) -> float:
    """Until the machine at this position of the chain has it all; the first is the master."""
    if config.simulation.weights.broadcast == "published":
        return published_broadcast_s(published(), model.weight_bytes, position)
    return formula_broadcast_s(
        position,
        weight_bytes=model.weight_bytes,
        startup_s=config.relay.link_startup_s,
        bytes_per_s=config.relay.link_bytes_per_s,
    )


def _train_s_per_token(
    simulation: SimulationConfig, model: ModelSize, calibration: Calibration, num_train_gpus: int
) -> float:
    training = simulation.training
    if training.fixed_s_per_mtoken is not None and training.gpu_s_per_mtoken is not None:
        return 1e-6 * (training.fixed_s_per_mtoken + training.gpu_s_per_mtoken / num_train_gpus)
    fitted = calibration.train_fixed_s_per_mtoken + calibration.train_gpu_s_per_mtoken / num_train_gpus
    return 1e-6 * fitted * model.num_parameters / FITTED_ON_PARAMETERS
