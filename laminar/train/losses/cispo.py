"""Computes CISPO: a policy gradient whose importance weight is cut, so that no token loses its gradient."""

from laminar.config import CispoLoss
from laminar.train.losses.loss import TokenBatch, TokenLoss, none_of, ratio_of


class Cispo:
    """-sg(min(policy / behaviour, ratio_max)) * A * log policy (MiniMax-M1 eq. 4; one-sided as in ScaleRL).

    The clip of GRPO takes the gradient of rare tokens away after one update, and those are where reasoning branches;
    here the ratio is only a weight.
    """

    needs_proximal = False

    def __init__(self, config: CispoLoss) -> None:
        self._config = config

    def __call__(self, tokens: TokenBatch) -> TokenLoss:
        ratio = ratio_of(tokens.policy_logprobs, tokens.behaviour_logprobs).detach()
        weight = ratio.clamp_max(self._config.ratio_max)
        return TokenLoss(
            loss=-weight * tokens.advantages * tokens.policy_logprobs,
            clipped=none_of(ratio),
            clipped_lower=none_of(ratio),
            truncated=ratio > self._config.ratio_max,
        )
