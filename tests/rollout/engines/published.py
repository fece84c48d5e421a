"""Builds leased versions, as a relay would hand them over, from Hugging Face models; and scores with those models."""

import os

import msgspec
import torch
from transformers import PreTrainedModel

from laminar.relay.manifest import LeasedVersion, Manifest, Probe, TensorEntry
from laminar.relay.segments import Segment

PROBE_TOKEN_IDS = tuple(range(3, 40))


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float = 1.0
) -> torch.Tensor:
    """The Hugging Face model's log-probs of the response's tokens: [len(response)]."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]


def publish(model: PreTrainedModel, version: int = 1, dtype: torch.dtype = torch.float32) -> LeasedVersion:
    """The model's weights as `version`, with a probe by transformers; a tied lm_head is not stated again."""
    tied = model.config.tie_word_embeddings
    tensors = {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    entries, chunks, offset = [], [], 0
    for name, tensor in tensors.items():
        raw = tensor.detach().to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
        padding = -len(raw) % 64
        entries.append(
            TensorEntry(
                name=name,
                dtype=str(dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset=offset,
                num_bytes=len(raw),
            )
        )
        chunks.append(raw + bytes(padding))
        offset += len(raw) + padding
    logprobs = reference_logprobs(model, PROBE_TOKEN_IDS[:1], PROBE_TOKEN_IDS[1:])
    probe = Probe(PROBE_TOKEN_IDS, tuple(logprobs.tolist()), tolerance=1e-4 if dtype == torch.float32 else 5e-2)
    manifest = Manifest(version, version, offset, offset, tuple(entries), probe)
    return lend(manifest, b"".join(chunks))


def lend(manifest: Manifest, data: bytes) -> LeasedVersion:
    """As a relay lends it: in memory that other processes can open. It stays until the test process ends."""
    segment = Segment()
    segment.reserve(len(data))
    segment.view[: len(data)] = data
    path = f"/proc/{os.getpid()}/fd/{segment.reader_fd}"
    return LeasedVersion(manifest, checksum=0, data=memoryview(data), path=path)


def with_tensors(leased: LeasedVersion, tensors: tuple[TensorEntry, ...]) -> LeasedVersion:
    manifest = msgspec.structs.replace(leased.manifest, tensors=tensors)
    return msgspec.structs.replace(leased, manifest=manifest)
