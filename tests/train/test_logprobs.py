import pytest
import torch
from transformers import AutoModelForCausalLM

from laminar.train import logprobs
from laminar.train.logprobs import token_logprobs
from laminar.train.packing import lay_out


@pytest.fixture
def model(any_model_path):
    return AutoModelForCausalLM.from_pretrained(any_model_path, dtype=torch.float32).eval()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("logits_per_chunk", [1 << 24, 97 * 5])
def test_equals_hugging_face_row_by_row_without_padding(model, sample, monkeypatch, temperature, logits_per_chunk):
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", logits_per_chunk)
    experiences = sample(model, 2)
    micro_batch = lay_out(experiences, range(len(experiences)))
    weight = torch.linspace(-1, 1, len(micro_batch.targets))

    model.zero_grad()
    ours, entropies = token_logprobs(model, micro_batch, temperature)
    (ours * weight).sum().backward()
    our_gradients = [parameter.grad.clone() for parameter in model.parameters()]

    model.zero_grad()
    theirs, their_entropies = [], []
    for experience in experiences:
        prompt, response = experience.prompt_token_ids, experience.response.token_ids
        logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        distribution = (logits / temperature).log_softmax(-1)
        theirs.append(distribution.gather(1, torch.tensor(response)[:, None])[:, 0])
        their_entropies.append(-(distribution.exp() * distribution).sum(-1))
    (torch.cat(theirs) * weight).sum().backward()

    torch.testing.assert_close(ours, torch.cat(theirs), atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies, torch.cat(their_entropies), atol=2e-5, rtol=0)
    for gradient, parameter in zip(our_gradients, model.parameters(), strict=True):
        assert (gradient - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-7
