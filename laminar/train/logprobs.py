"""Computes log-probs and entropies of given tokens without ever holding all their logits.

The logits of a long micro-batch over a vocabulary of 150 thousand are the largest tensor of training. Only positions
that predict a trained token get any, a chunk at a time, and the backward pass computes each chunk anew.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from transformers import PreTrainedModel

from laminar.train.packing import MicroBatch

LOGITS_PER_CHUNK = 1 << 24
"""Elements: 64 MiB in float32."""


def token_logprobs(
    model: PreTrainedModel, micro_batch: MicroBatch, temperature: float, *, float32_head: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs (nats, with gradient) and entropies (without) of the trained tokens at `temperature`.

    Both [num_trained_tokens], float32. float32_head: multiply by the output embedding in float32, whatever the
    model's own dtype is; from the logits on, everything is float32 in any case.
    """
    hidden = model.base_model(
        input_ids=micro_batch.token_ids,
        position_ids=micro_batch.position_ids,
        runs=micro_batch.runs,
        use_cache=False,
    ).last_hidden_state
    hidden = hidden[0, micro_batch.predictors]
    weight: Tensor = model.get_output_embeddings().weight  # pyright: ignore[reportOptionalMemberAccess]
    if float32_head:
        hidden, weight = hidden.float(), weight.float()
    return _HeadLogprobs.apply(hidden, weight, micro_batch.targets, temperature)  # pyright: ignore


class _HeadLogprobs(Function):
    """log softmax(hidden @ weight.T / temperature)[target], and the entropy of that distribution.

    hidden: [num_tokens, hidden_size]; weight: [vocabulary, hidden_size], of the same dtype; targets: [num_tokens].
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, log_totals, entropies = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for chunk in _chunks(len(hidden), len(weight)):
            logits = _logits(hidden[chunk], weight, temperature)
            log_total = logits.logsumexp(-1)
            chosen = logits.gather(1, targets[chunk, None])[:, 0]
            logprobs[chunk] = chosen - log_total
            log_totals[chunk] = log_total
            probs = torch.exp(logits - log_total[:, None])
            entropies[chunk] = log_total - torch.linalg.vecdot(probs, logits)
        ctx.save_for_backward(hidden, weight, targets, log_totals)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad, _ = grad_outputs
        hidden, weight, targets, log_totals = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Its chunks are summed in float32: in bfloat16 a late chunk would be lost beside the sum of the early ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        scaled = (grad / ctx.temperature)[:, None]
        for chunk in _chunks(len(hidden), len(weight)):
            logits = _logits(hidden[chunk], weight, ctx.temperature)
            # d logprob / d logits = onehot(target) - softmax
            grad_logits = logits.sub_(log_totals[chunk, None]).exp_().mul_(-scaled[chunk])
            grad_logits.scatter_add_(1, targets[chunk, None], scaled[chunk])
            grad_hidden[chunk] = grad_logits.to(hidden.dtype) @ weight
            grad_weight.addmm_(grad_logits.T, hidden[chunk].float())
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[num_tokens, vocabulary], float32: a tensor of its own, that the caller may overwrite."""
    return (hidden @ weight.T).float().div_(temperature)


def _chunks(num_rows: int, row_elements: int) -> list[slice]:
    rows = max(1, LOGITS_PER_CHUNK // row_elements)
    return [slice(begin, begin + rows) for begin in range(0, num_rows, rows)]
