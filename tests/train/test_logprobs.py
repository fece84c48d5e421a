import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from laminar.train import logprobs
from laminar.train.logprobs import token_logprobs
from laminar.train.model import load_model
from laminar.train.packing import lay_out


@pytest.fixture
def model(any_model_path):
    return load_model(any_model_path)


@pytest.fixture
def reference(any_model_path):
    """As transformers loads it: its own attention, one unpadded row at a time."""
    return AutoModelForCausalLM.from_pretrained(any_model_path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("logits_per_chunk", [1 << 24, 97 * 5])
def test_equals_hugging_face_row_by_row_without_padding(
    model, reference, sample, monkeypatch, temperature, logits_per_chunk
):
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", logits_per_chunk)
    experiences = sample(model, 2)
    experiences = [*experiences, experiences[2]]  # one length twice: two neighbours attend in one call
    micro_batch = lay_out(experiences, sorted(range(9), key=lambda i: len(experiences[i].response.token_ids)))
    assert any(num_sequences > 1 for num_sequences, _ in micro_batch.runs)
    weight = torch.linspace(-1, 1, len(micro_batch.targets))

    model.zero_grad()
    ours, entropies = token_logprobs(model, micro_batch, temperature, float32_head=False)
    (ours * weight).sum().backward()
    our_gradients = [parameter.grad.clone() for parameter in model.parameters()]

    reference.zero_grad()
    theirs, their_entropies = [], []
    for experience in sorted(experiences, key=lambda e: len(e.response.token_ids)):
        prompt, response = experience.prompt_token_ids, experience.response.token_ids
        logits = reference(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        distribution = (logits / temperature).log_softmax(-1)
        theirs.append(distribution.gather(1, torch.tensor(response)[:, None])[:, 0])
        their_entropies.append(-(distribution.exp() * distribution).sum(-1))
    (torch.cat(theirs) * weight).sum().backward()

    torch.testing.assert_close(ours, torch.cat(theirs), atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies, torch.cat(their_entropies), atol=2e-5, rtol=0)
    for gradient, parameter in zip(our_gradients, reference.parameters(), strict=True):
        assert (gradient - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-7


@pytest.mark.parametrize("float32_head", [False, True])
def test_a_float32_head_is_nearer_to_the_truth_of_a_bfloat16_model(qwen2_path, sample, float32_head):
    model = load_model(qwen2_path).to(torch.bfloat16)
    micro_batch = lay_out(sample(load_model(qwen2_path), 4), range(16))
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=micro_batch.token_ids, position_ids=micro_batch.position_ids, runs=micro_batch.runs
        ).last_hidden_state[0, micro_batch.predictors]
    logits = hidden.double() @ model.get_output_embeddings().weight.double().T
    truth = logits.log_softmax(-1).gather(1, micro_batch.targets[:, None])[:, 0]

    model.zero_grad()
    ours, _ = token_logprobs(model, micro_batch, 1.0, float32_head=float32_head)
    ours.sum().backward()
    assert ours.dtype == torch.float32
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())
    error = (ours.detach().double() - truth).abs().max().item()
    assert (error < 1e-5) is float32_head, error
    assert error < 0.05


def test_no_more_logits_than_a_chunk_are_held_at_once(qwen2_path, sample, monkeypatch):
    """The largest tensor that the head makes, forwards and backwards, is a chunk of logits."""
    model = load_model(qwen2_path)
    micro_batch = lay_out(sample(model, 4), range(16))
    weight = model.get_output_embeddings().weight
    vocabulary = len(weight)
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 5 * vocabulary)
    largest: list[int] = []

    class Sizes(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            result = function(*arguments, **(keywords or {}))
            is_matrix = isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[-1] == vocabulary
            # The embedding itself, transposed, has that shape too.
            if is_matrix and result.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
                largest.append(result.shape[0])
            return result

    with Sizes():
        ours, _ = token_logprobs(model, micro_batch, 1.0, float32_head=False)
        ours.sum().backward()
    assert len(micro_batch.targets) > 100 and max(largest) == 5
