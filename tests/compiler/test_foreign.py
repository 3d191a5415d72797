"""Calls of other libraries that would lose a compiled model's weights are refused, or said aloud."""

import copy
import io
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import mlp, quick
from twofour.errors import ExportError

pytestmark = pytest.mark.usefixtures("no_measuring")


class Part(nn.Module):
    """A model with the method of transformers, inside another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "weights.pt")

    def push_to_hub(self, folder: Path) -> None:
        self.save_pretrained(folder)


class Whole(Part):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Part()  # type: ignore[assignment]


def _copies(fast: nn.Module) -> list[nn.Module]:
    stream = io.BytesIO()
    torch.save(fast, stream)
    stream.seek(0)
    return [fast, copy.deepcopy(fast), torch.load(stream, weights_only=False)]


def test_a_compiled_model_writes_no_checkpoint_of_transformers(tmp_path: Path) -> None:
    model, x = twofour.prune(Whole(), "2:4").eval(), torch.ones(2, 64)
    for fast in _copies(quick(model)):
        torch.testing.assert_close(fast(x), model(x).detach())
        for call in (fast.save_pretrained, fast.push_to_hub, fast.inner.save_pretrained):
            with pytest.raises(ExportError, match=r"packed weights[\s\S]*twofour\.save[\s\S]*export\.to_huggingface"):
                call(tmp_path)
        assert list(fast.state_dict()) == [name for name in model.state_dict() if name.endswith("bias")]
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path)  # the model that was compiled is as it was
    assert list(tmp_path.iterdir())


def test_a_compiled_model_of_transformers_writes_no_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [text] is not installed")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**size, vocab_size=32)).eval()
    fast = quick(twofour.prune(model, "2:4"))
    with pytest.raises(ExportError, match="no checkpoint of transformers"):
        fast.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("around", [False, True])
def test_weights_that_a_load_passes_by_are_named_once(around: bool, caplog: pytest.LogCaptureFixture) -> None:
    fast = quick(twofour.prune(mlp(), "2:4"))
    other = mlp(1)
    if around:
        fast, other = nn.Sequential(fast), nn.Sequential(other)
    with caplog.at_level(logging.WARNING, "twofour"):
        fast.load_state_dict(other.state_dict(), strict=False)
    said = [record.getMessage() for record in caplog.records if "not taken" in record.getMessage()]
    start = "0." if around else ""
    assert len(said) == 1 and all(f"`{start}{index}.weight`" in said[0] for index in (0, 2, 3)), said
    inner = fast[0] if around else fast
    assert torch.equal(inner[3].bias, mlp(1)[3].bias)


def test_a_load_of_its_own_state_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    fast = quick(twofour.prune(mlp(), "2:4"))
    for strict in (False, True):
        fast.load_state_dict(fast.state_dict(), strict=strict)
    assert "not taken" not in caplog.text
