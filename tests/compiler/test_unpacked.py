"""The weight of a compiled layer: looked at for nothing, unpacked for operators, never written to."""

import copy
import logging
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twofour
from twofour.compiler.layer import CompiledLinear
from twofour.compiler.unpacked import UnpackedWeight
from twofour.errors import KernelError

from .small import TOKENS, mlp


def _compiled(seed: int = 0) -> tuple[nn.Sequential, nn.Module]:
    model = twofour.prune(mlp(seed), "2:4")
    return model, twofour.compile(model, memory="small", tokens=TOKENS)


def _forbid_unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was unpacked")

    monkeypatch.setattr("twofour.compiler.layer.PreparedWeights.source", refuse)


def test_what_is_known_of_a_weight_costs_no_unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = _compiled()
    _forbid_unpacking(monkeypatch)
    for index in (0, 2):
        weight, dense = fast[index].weight, model[index].weight
        assert isinstance(weight, Tensor) and weight is fast[index].weight
        assert (weight.dtype, weight.shape, weight.device) == (dense.dtype, dense.shape, dense.device)
        assert (weight.stride(), weight.numel(), weight.ndim, weight.nbytes) == (
            dense.stride(),
            dense.numel(),
            dense.ndim,
            dense.nbytes,
        )
        assert weight.is_floating_point() and not weight.requires_grad and weight.layout is torch.strided


def test_a_bfloat16_layer_of_a_float32_model_says_float32() -> None:
    model = twofour.prune(mlp(), "2:4")
    fast = twofour.compile(model, dtype="bfloat16", memory="small", tokens=TOKENS)
    assert fast[0].weight.dtype is torch.float32


def test_a_forward_that_asks_for_the_dtype_of_a_weight_runs_packed(
    no_measuring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi, self.wo = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.wo(torch.relu(self.wi(x)).to(self.wo.weight.dtype))

    model = twofour.prune(Asks(), "2:4")
    fast = twofour.compile(model, torch.randn(3, 64), memory="small", tokens=TOKENS)
    x = torch.randn(5, 64)
    _forbid_unpacking(monkeypatch)
    torch.testing.assert_close(fast(x), model(x))
    assert isinstance(fast.wo, CompiledLinear)


@pytest.mark.long
def test_generate_of_a_t5_unpacks_nothing(no_measuring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward asks for `wo.weight.dtype` once a layer and token."""
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    ids = torch.randint(3, 90, (1, 8))
    given = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    twofour.prune(model, "2:4")
    example = {"input_ids": ids, "decoder_input_ids": torch.zeros(1, 1, dtype=torch.long)}
    fast = twofour.compile(model, example, memory="small", tokens=(1, 8))
    assert isinstance(fast.encoder.block[0].layer[1].DenseReluDense.wo, CompiledLinear)
    want = model.generate(ids, **given)
    _forbid_unpacking(monkeypatch)
    assert torch.equal(fast.generate(ids, **given), want)


READS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "linear": lambda w, x: F.linear(x, w),
    "product": lambda w, x: x @ w.T,
    "transposed product": lambda w, x: w @ x.t(),
    "sum": lambda w, x: w.sum(),
    "row": lambda w, x: w[3],
    "number": lambda w, x: w[3, 1].item(),
    "rows": lambda w, x: w[torch.tensor([1, 4])],
    "joined": lambda w, x: torch.cat([w, w]),
    "another type": lambda w, x: w.double(),
    "compared": lambda w, x: w == 0,
    "halves": lambda w, x: w.chunk(2)[1],
    "in order of size": lambda w, x: w.sort().values,
    "lists": lambda w, x: w.tolist(),
    "array": lambda w, x: np.asarray(w.detach()),
    "text": lambda w, x: repr(w.detach().clone()),
    "pickled": lambda w, x: pickle.loads(pickle.dumps(w.detach())),
    "under vmap": lambda w, x: torch.vmap(lambda row: w @ row)(x),
}


@pytest.mark.parametrize("read", READS)
def test_operators_compute_with_the_values(read: str) -> None:
    model, fast = _compiled()
    x = torch.randn(3, 64)
    found, want = (READS[read](part[0].weight, x) for part in (fast, model))
    if isinstance(want, Tensor):
        torch.testing.assert_close(torch.as_tensor(found).detach().clone(), want.detach())
    else:
        assert np.array_equal(found, want) if isinstance(want, np.ndarray) else found == want


def _assign(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(torch.zeros(128, 64))


def _assign_tensor(layer: nn.Module) -> None:
    layer.weight = torch.zeros(128, 64)


def _put(layer: nn.Module, at: object) -> None:
    layer.weight[at] = 0


def _assign_data(layer: nn.Module) -> None:
    layer.weight.data = torch.zeros(128, 64)


def _add(layer: nn.Module) -> None:
    layer.weight += 1


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "mul_": lambda layer: layer.weight.mul_(2),
    "data": lambda layer: layer.weight.data.zero_(),
    "detached": lambda layer: layer.weight.detach().zero_(),
    "out": lambda layer: torch.neg(torch.zeros(128, 64), out=layer.weight),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight], 2),
    "initialised": lambda layer: nn.init.xavier_uniform_(layer.weight),
    "row": lambda layer: layer.weight[0].zero_(),
    "a view of a view": lambda layer: layer.weight.t()[1:].unsqueeze(0).zero_(),
    "transposed": lambda layer: layer.weight.T.zero_(),
    "half": lambda layer: layer.weight.chunk(2)[1].zero_(),
    "flat": lambda layer: layer.weight.reshape(-1).zero_(),
    "same type": lambda layer: layer.weight.float().zero_(),
    "contiguous": lambda layer: layer.weight.contiguous().zero_(),
    "element": lambda layer: _put(layer, (0, 1)),
    "elements": lambda layer: _put(layer, torch.tensor([0, 3])),
    "mask": lambda layer: _put(layer, torch.ones(128, 64, dtype=torch.bool)),
    "in place": _add,
    "resized": lambda layer: layer.weight.resize_(2, 2),
    "applied": lambda layer: layer.weight.apply_(lambda value: 0),
    "new data": _assign_data,
    "a parameter in its place": _assign,
    "a tensor in its place": _assign_tensor,
    "registered": lambda layer: layer.register_parameter("weight", nn.Parameter(torch.zeros(1))),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused_and_changes_nothing(write: str) -> None:
    _, fast = _compiled()
    before = fast[0].weight.clone()
    with pytest.raises(KernelError, match="layer `0`: the weight of a compiled layer cannot be changed") as raised:
        WRITES[write](fast[0])
    assert "change the weight of the model that was compiled" in str(raised.value)
    assert torch.equal(fast[0].weight, before)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
def test_a_trace_records_the_values() -> None:
    model, fast = _compiled()
    x = torch.randn(3, 64)
    traced = torch.jit.trace(lambda y: F.linear(y, fast[0].weight), x)
    torch.testing.assert_close(traced(x), F.linear(x, model[0].weight))


@pytest.mark.parametrize("ask", ["data_ptr", "untyped_storage", "storage", "share_memory_"])
def test_memory_that_is_not_there_is_refused(ask: str) -> None:
    _, fast = _compiled()
    with pytest.raises(KernelError, match=r"no memory of its own[\s\S]*weight.clone\(\)"):
        getattr(fast[0].weight, ask)()


def test_reading_is_said_once_per_model(caplog: pytest.LogCaptureFixture) -> None:
    _, fast = _compiled()
    with caplog.at_level(logging.WARNING, logger="twofour"):
        for index in (0, 2, 0):
            fast[index].weight.sum()
    assert caplog.text.count("an operator reads the dense weight") == 1 and "layer `0`" in caplog.text


def test_copies_and_pickles_read_their_own_weights() -> None:
    model, fast = _compiled()
    fast[0].weight.sum()
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(twin[0].weight, model[0].weight) and isinstance(twin[0].weight, UnpackedWeight)


def test_a_convolution_has_the_same_stand_in() -> None:
    model = twofour.prune(nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(2), nn.Conv1d(32, 16, 1)), "2:4")
    fast = twofour.compile(model, torch.randn(2, 16, 6, 6), graph=False)
    for index in (0, 3):
        layer, dense = fast[index], model[index].weight
        assert isinstance(layer.weight, UnpackedWeight) and layer.weight.shape == dense.shape
        torch.testing.assert_close(layer.weight.clone(), dense.detach())
        with pytest.raises(KernelError, match="cannot be changed"):
            layer.weight.zero_()
        with pytest.raises(KernelError, match="cannot be changed"):
            layer.weight = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("modes", [(False, True), (True, False), (True, True)])
def test_a_view_of_the_weight_is_read_in_and_out_of_inference_mode(modes: tuple[bool, bool]) -> None:
    model = twofour.prune(nn.Sequential(nn.Linear(64, 64)), "2:4")
    fast, x = twofour.compile(model, tokens=(1,), memory="small"), torch.randn(3, 64)
    for mode in modes:
        with torch.no_grad(), torch.inference_mode(mode):
            weight = model[0].weight
            torch.testing.assert_close(nn.functional.linear(x, fast[0].weight[:16]), x @ weight[:16].t())
            torch.testing.assert_close(x @ fast[0].weight.t().detach(), x @ weight.t())
