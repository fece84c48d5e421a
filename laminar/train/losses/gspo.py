"""Computes GSPO: one ratio a trajectory (Zheng et al. 2025, "Group Sequence Policy Optimization")."""

from laminar.config import GspoLoss
from laminar.train.losses.clip import clipped_surrogate
from laminar.train.losses.loss import TokenBatch, TokenLoss, ratio_of, sum_over_rows


class Gspo:
    """Clipped surrogate of s = (policy / behaviour of the whole response) ^ (1 / its length) (eq. 5 and 7).

    Each token of a trajectory has the same loss, and the gradient of s goes to all of them; with
    `aggregation=sequence_mean` they add up to the paper's loss a trajectory. A trajectory is clipped whole.
    """

    needs_proximal = False

    def __init__(self, config: GspoLoss) -> None:
        self._config = config

    def __call__(self, tokens: TokenBatch) -> TokenLoss:
        policy, num_tokens = sum_over_rows(tokens.policy_logprobs, tokens.rows)
        behaviour, _ = sum_over_rows(tokens.behaviour_logprobs, tokens.rows)
        return clipped_surrogate(
            ratio_of(policy / num_tokens, behaviour / num_tokens),
            tokens.advantages,
            clip_ratio_low=self._config.clip_ratio_low,
            clip_ratio_high=self._config.clip_ratio_high,
            clip_ratio_c=None,
        )
