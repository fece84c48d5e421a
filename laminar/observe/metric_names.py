"""Lists every metric with its unit and meaning: the one place where a name is born.

verl's spelling where verl has the metric, the glossary's words for the rest. A name that ends in `/*` is a family.
"""

from collections.abc import Iterator

import msgspec


class Metric(msgspec.Struct, frozen=True):
    name: str
    unit: str
    meaning: str


class Topic(msgspec.Struct, frozen=True):
    """Metrics that belong together, as a section of docs/metrics.md."""

    title: str
    metrics: tuple[Metric, ...]


def _spread(name: str, unit: str, meaning: str, ends: tuple[str, ...] = ("mean", "max", "min")) -> Iterator[Metric]:
    words = {"mean": "Mean", "max": "Largest", "min": "Smallest"}
    return (Metric(f"{name}/{end}", unit, f"{words[end]} {meaning}") for end in ends)


PROGRESS = Topic(
    "Progress",
    (
        Metric("training/global_step", "steps", "Steps done; each made one new weight version."),
        Metric("training/epoch", "epochs", "Passes over the training prompts that were dispatched whole."),
        Metric("training/version", "version", "Newest weight version handed over when the step ended."),
        *_spread("critic/score", "reward", "score of the trajectories trained in the step, as the reward gave it."),
        *_spread("critic/rewards", "reward", "reward: the score, minus what trainer.overlong takes off for length."),
        *_spread("critic/advantages", "1", "advantage (reward standardised within its prompt group)."),
        Metric("critic/advantages/mean/*", "1", "Mean advantage of trajectories of one staleness: `staleness_<n>`."),
        Metric("frac_reward_zero_std", "share", "Prompt groups whose rewards are all equal; they teach nothing."),
        Metric("val-core/*", "reward", "Held-out accuracy: `val-core/<data source>/<what>/mean@<responses a prompt>`."),
        Metric("reward/*", "reward", "Further values that the reward function returned, mean over the step, by key."),
    ),
)

_MISMATCH = "|engine - trainer| log-prob under the same weights: staleness 0, before the step's first update."
_BY_STALENESS = "The same for trajectories of one staleness: `staleness_<n>`."

POLICY = Topic(
    "Policy",
    (
        Metric("actor/pg_loss", "1", "Policy loss, the mean that trainer.loss.aggregation names over a mini-batch."),
        Metric("actor/pg_clipfrac", "share", "Trained tokens whose gradient the clip took away."),
        Metric("actor/pg_clipfrac/*", "share", _BY_STALENESS),
        Metric("actor/pg_clipfrac_lower", "share", "The same by the dual clip: advantage below 0, ratio above c."),
        Metric("actor/ppo_kl", "nats", "Mean of behaviour log-prob minus policy log-prob."),
        Metric("actor/kl_loss", "nats", "KL(policy || initial weights), k3, weighed like the loss; if asked for."),
        Metric("actor/kl_coef", "1", "Its weight in the loss."),
        Metric("actor/entropy", "nats", "Mean entropy of the policy over the trained tokens."),
        Metric("actor/entropy/*", "nats", _BY_STALENESS),
        Metric("actor/grad_norm", "1", "Global gradient norm before it is scaled down."),
        Metric("actor/lr", "1", "Learning rate of the update."),
        Metric("actor/num_updates_skipped", "updates", "Updates left out since loss or gradient was not finite."),
        Metric("actor/forwarded_token_ratio", "share", "Trained tokens that needed a forward pass (advantage not 0)."),
        Metric("training/rollout_probs_diff_mean", "probability", "Mean |policy - behaviour| probability of a token."),
        Metric(
            "training/rollout_probs_diff_max", "probability", "Largest |policy - behaviour| probability of a token."
        ),
        Metric("training/rollout_probs_diff_std", "probability", "Standard deviation of |policy - behaviour|."),
        Metric("training/rollout_actor_probs_pearson_corr", "1", "Correlation of policy and behaviour probabilities."),
        Metric("training/engine_mismatch/logprob_diff_mean", "nats", f"Mean {_MISMATCH}"),
        Metric("training/engine_mismatch/logprob_diff_max", "nats", f"Largest {_MISMATCH}"),
        Metric("training/engine_mismatch/k3_kl", "nats", "KL(engine || trainer) on the same tokens, k3 estimate."),
        Metric("rollout_corr/k3_kl", "nats", "KL(behaviour || policy), Schulman's k3 estimate."),
        Metric("rollout_corr/k3_kl/*", "nats", _BY_STALENESS),
        Metric("rollout_corr/rollout_is_mean", "1", "Mean policy ratio of a token."),
        Metric("rollout_corr/rollout_is_mean/*", "1", _BY_STALENESS),
        Metric("rollout_corr/rollout_is_max", "1", "Largest policy ratio of a token."),
        Metric("rollout_corr/rollout_is_min", "1", "Smallest policy ratio of a token."),
        Metric("rollout_corr/rollout_is_ratio_fraction_high", "share", "Tokens whose importance weight was cut."),
        Metric(
            "rollout_corr/rollout_is_eff_sample_size", "share", "Effective sample size of the ratios, of the tokens."
        ),
        Metric("rollout_corr/rollout_is_eff_sample_size/*", "share", _BY_STALENESS),
    ),
)

TRAJECTORIES = Topic(
    "Trajectories",
    (
        *_spread("response_length", "tokens", "response trained in the step."),
        Metric("response_length/clip_ratio", "share", "Responses cut at data.response_tokens_max."),
        *_spread("prompt_length", "tokens", "prompt trained in the step."),
        Metric("prompt_length/clip_ratio", "share", "Prompts as long as data.prompt_tokens_max."),
        *_spread("num_turns", "turns", "number of turns of a trajectory."),
    ),
)

STALENESS = Topic(
    "Staleness",
    (
        *_spread(
            "training/off_policy/trajectory_staleness",
            "versions",
            "staleness at train: trainer's version minus the trajectory's, as its step began.",
        ),
        *_spread(
            "training/off_policy/trajectory_staleness_at_finish",
            "versions",
            "staleness at finish, over what finished since the step before: the part that waiting cannot add to.",
        ),
        Metric("training/off_policy/trajectory_spans/max", "versions", "Weight versions in one trajectory: always 1."),
        *_spread(
            "publish_lag", "versions", "publish lag of a replica: newest version minus the one held.", ("mean", "max")
        ),
    ),
)

ROLLOUT = Topic(
    "Replicas",
    (
        Metric("rollout/kv_utilization", "share", "KV utilization at the step's end, mean over the replicas."),
        Metric("rollout/num_running", "trajectories", "Decoding at the step's end, all replicas."),
        Metric("rollout/num_waiting", "trajectories", "Waiting for KV blocks at the step's end, all replicas."),
        Metric(
            "rollout/num_preemptions", "trajectories", "Put back into the queue for want of KV blocks, in the step."
        ),
        Metric("rollout/num_replicas", "replicas", "Replicas that are up at the step's end."),
        Metric("rollout/num_refreshes", "refreshes", "Batches that began with newer weights, in the step."),
        Metric("rollout/num_repack_moves", "migrations", "Replicas emptied by repack, in the step."),
        Metric("rollout/idle_ratio", "share", "Replicas' time up in which they had nothing to do, over the step."),
        Metric("rollout/tokens_per_s", "tokens/s", "Response tokens decoded a second, all replicas, over the step."),
    ),
)

POOL = Topic(
    "Pools",
    (
        Metric("pool/in_flight", "trajectories", "Dispatched and not yet finished, at the step's end."),
        Metric("pool/buffered", "trajectories", "Scored and waiting for the trainer, at the step's end."),
        Metric("pool/recovered", "trajectories", "Saved from lost replicas with their tokens so far, since the start."),
        Metric("pool/restarted", "trajectories", "Started again since no relay held their version, since the start."),
        Metric("pool/dropped", "trajectories", "Dropped by name, for whatever reason, since the start."),
    ),
)

RELAY = Topic(
    "Relays",
    (
        Metric("relay/version", "version", "Oldest among the newest versions that the relays hold whole."),
        Metric("relay/broadcast_s", "s", "From the last complete hand-over to the last machine."),
        Metric("relay/num_lost", "relays", "Relays lost, since the start."),
    ),
)

TIME = Topic(
    "Time",
    (
        Metric("perf/throughput", "tokens/s", "Response tokens trained a second of the step, all machines together."),
        Metric("perf/total_num_tokens", "tokens", "Response tokens trained in the step."),
        Metric("perf/time_per_step", "s", "From the end of the step before to the end of this one."),
        Metric("timing_s/step", "s", "The same as perf/time_per_step."),
        Metric("timing_s/wait_for_batch", "s", "The trainer waited for prompt groups, within the step."),
        Metric("timing_s/update_actor", "s", "The trainer trained, within the step."),
        Metric("timing_s/publish_stall", "s", "The trainer handed weights over and did nothing else, within the step."),
        Metric("timing_s/save_checkpoint", "s", "The trainer waited for a checkpoint, within the step."),
        Metric("fully_async/trainer/idle_ratio", "share", "Trainer's time in which it waited for prompt groups."),
    ),
)

TOPICS = (PROGRESS, POLICY, TRAJECTORIES, STALENESS, ROLLOUT, POOL, RELAY, TIME)

_NAMES = frozenset(metric.name for topic in TOPICS for metric in topic.metrics)
_FAMILIES = tuple(name.removesuffix("*") for name in _NAMES if name.endswith("/*"))


def is_listed(name: str) -> bool:
    return name in _NAMES or any(name.startswith(f) and len(name) > len(f) for f in _FAMILIES)


def metrics_page() -> str:
    """docs/metrics.md, whole."""
    lines = [
        "# Metrics",
        "",
        "Written to `metrics.jsonl` in the run's folder at every step's end, and to TensorBoard. Names are verl's "
        "where verl has the metric. This page is generated from `laminar/observe/metric_names.py`; "
        "`python -m laminar.observe.metric_names` writes it anew.",
    ]
    for topic in TOPICS:
        lines += ["", f"## {topic.title}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines += [
            f"| `{m.name}` | {m.unit} | {m.meaning[0].upper()}{m.meaning[1:]} |".replace("||", r"\|\|")
            for m in topic.metrics
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    Path("docs/metrics.md").write_text(metrics_page())
