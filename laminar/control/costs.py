"""Models what a step of a replica costs: decode and prefill of named accelerators, scaled, and the batch bound B."""

import sys
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from laminar.control.messages import DecodeCost


class AcceleratorProfile(msgspec.Struct, frozen=True):
    """One replica of a named model on a named accelerator, as measured or published."""

    decode: DecodeCost
    prefill_s_per_token: float
    kv_capacity_tokens: int


# h800-qwen2.5-32b-tp4. Decode: the fit `step_ms = 15..20 + 2e-5 * KV tokens + 0.10 * running` that reproduces the
# Laminar paper's Table 1 and Figure 16 (about 60 ms a step at 270 running and 650K KV tokens), floor in the middle.
# Prefill: 34.5 / 64 / 130 / 270 ms for 1K / 2K / 4K / 8K tokens (aiconfigurator's kernel database, H100, vLLM), a
# straight line within 8 %. KV capacity: four H800 minus the bf16 weights, at the paper's memory share.
PROFILES: Mapping[str, AcceleratorProfile] = MappingProxyType(
    {
        "h800-qwen2.5-32b-tp4": AcceleratorProfile(
            decode=DecodeCost(floor_s=17.5e-3, per_kv_token_s=2e-8, per_running_s=0.10e-3),
            prefill_s_per_token=0.032e-3,
            kv_capacity_tokens=790_000,
        )
    }
)


def scale_profile(
    profile: AcceleratorProfile, *, time_scale: float, batch_scale: float, kv_capacity_tokens: int
) -> AcceleratorProfile:
    """The profile as a tiny replica imitates it, so that a full replica here costs what a full one costs there.

    time_scale: seconds here for a second there; it multiplies everything. A KV token counts for as many there as the
    two KV capacities say; one trajectory counts for `batch_scale` there, when it decodes and when it is prefilled.
    """
    token_scale = profile.kv_capacity_tokens / kv_capacity_tokens
    return AcceleratorProfile(
        decode=DecodeCost(
            floor_s=time_scale * profile.decode.floor_s,
            per_kv_token_s=time_scale * token_scale * profile.decode.per_kv_token_s,
            per_running_s=time_scale * batch_scale * profile.decode.per_running_s,
        ),
        prefill_s_per_token=time_scale * batch_scale * profile.prefill_s_per_token,
        kv_capacity_tokens=kv_capacity_tokens,
    )


def decode_step_s(cost: DecodeCost, *, num_running: int, num_kv_tokens: int) -> float:
    """Seconds of one decode step."""
    return cost.floor_s + cost.per_kv_token_s * num_kv_tokens + cost.per_running_s * num_running


def decode_batch_max(cost: DecodeCost, *, tolerance: float, context_tokens: int) -> int:
    """B: the largest decode batch whose step costs at most `tolerance` times a step at batch 1; at least 1.

    context_tokens: KV tokens of each trajectory. `sys.maxsize` when a further trajectory costs nothing.
    """
    if tolerance < 1:
        raise ValueError(f"tolerance={tolerance} asks for a step cheaper than one at batch 1; set it to 1 or more")
    per_trajectory_s = cost.per_running_s + cost.per_kv_token_s * context_tokens
    if per_trajectory_s <= 0:
        return sys.maxsize
    bound_s = tolerance * (cost.floor_s + per_trajectory_s)
    # The division may land a rounding error below the integer it means.
    bound = (bound_s - cost.floor_s) / per_trajectory_s + 1e-9
    return max(1, int(bound)) if bound < sys.maxsize else sys.maxsize
