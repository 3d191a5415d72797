"""Buffers that no checkpoint holds, of models on the meta device."""

from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from twofour.errors import FormatError

transformers = pytest.importorskip("transformers")


def _config(kind: str) -> object:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return getattr(transformers, f"{kind}Config")(**sizes, vocab_size=50)


class Classifier(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.head = getattr(transformers, f"{kind}Model")(_config(kind)), nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(input_ids=ids).last_hidden_state)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Llama"])
def test_a_hugging_face_model_on_the_meta_device_loads(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = twofour.prune(Classifier(kind).eval(), "2:4")
    twofour.save(twofour.compile(model, tokens=(1,)), tmp_path / "model.safetensors")
    state = torch.get_rng_state()
    with torch.device("meta"):
        empty = Classifier(kind)
    fast = twofour.load(tmp_path / "model.safetensors", empty, tokens=(1,))
    assert torch.equal(torch.get_rng_state(), state)
    ids = torch.randint(3, 50, (2, 7))
    with torch.inference_mode():
        torch.testing.assert_close(fast(ids), model(ids), atol=1e-4, rtol=1e-4)


def test_buffers_that_follow_from_no_configuration_are_named(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.register_buffer("steps", torch.arange(4), persistent=False)

    twofour.save(twofour.compile(Own(), tokens=(1,)), tmp_path / "own.safetensors")
    with torch.device("meta"):
        empty = Own()
    with pytest.raises(FormatError, match="steps are on the meta device"):
        twofour.load(tmp_path / "own.safetensors", empty, tokens=(1,))
