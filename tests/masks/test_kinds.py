"""Masks on every kind of layer: training, state dicts, copies, pickles, files; several masks in one module."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import twofour
from tests.layers.small import EVERY, LAYERS, Conv1D
from tests.turns import in_turn
from twofour import checker, masks
from twofour.errors import FormatError

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

ATTENTION = ("fused", "separate")
EACH = [kind for kind in EVERY if kind not in ("conv3d", "rnn", "rnn_cell")]  # the same code as their neighbours


def inputs(kind: str, model: nn.Module) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    if kind in LAYERS:
        return (torch.randn(LAYERS[kind][1]),)
    if kind in ATTENTION:
        return tuple(torch.randn(2, 3, size) for size in (16, model.kdim, model.vdim))
    return (torch.randn(2, 16),) if kind.endswith("cell") else (torch.randn(5, 2, 16),)


def loss(model: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    leaves = torch.utils._pytree.tree_leaves(model(*given))
    return sum((leaf.square().sum() for leaf in leaves), torch.zeros(()))


def pruned(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return twofour.prune(EVERY[kind](), "2:4")


def assert_sparse(model: nn.Module) -> None:
    report = checker.check(model)
    assert report.ok and all(found.kept for found in report.layers), str(report)
    for name, mask in masks.of(model).items():
        weight = mask.module.get_parameter(mask.attribute)
        assert 2 * int((weight != 0).sum()) == weight.numel(), name
        assert torch.equal(weight != 0, mask.keep)


@in_turn("kind", EACH)
def test_training_keeps_every_weight_sparse(kind: str) -> None:
    dense, model = EVERY[kind](), pruned(kind)
    assert list(model.state_dict()) == list(dense.state_dict())
    two_axes = [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]
    assert sorted(masks.of(model)) == sorted(two_axes)
    copies = [model, copy.deepcopy(model)]
    if kind != "hf_conv1d":  # our stand-in for a class of another library cannot be pickled under that name
        copies.append(pickle.loads(pickle.dumps(model)))
    for each in copies:
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        before = loss(each, inputs(kind, each))
        before.backward()
        optimizer.step()
        assert_sparse(each)
        assert not torch.equal(loss(each, inputs(kind, each)), before)
    for name, parameter in model.state_dict().items():
        assert all(torch.equal(parameter, each.state_dict()[name]) for each in copies[1:])


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("packed", [True, False])
def test_files_bring_weights_and_masks_back(kind: str, packed: bool, tmp_path: Path) -> None:
    model, path = pruned(kind), tmp_path / "m.safetensors"
    twofour.save(model, path, packed=packed)
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_slice(name) for name in masks.of(model)}
        stands_in = {name: (part.get_dtype(), part.get_shape()) == ("U8", [0]) for name, part in stored.items()}
    assert set(stands_in.values()) == {packed}, "an empty tensor under the name of a packed weight"
    other = twofour.load(path, EVERY[kind](), masked=True)
    assert_sparse(other)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in other.state_dict().items())
    fast = twofour.load(path, EVERY[kind]().eval(), tokens=(1,))
    given = inputs(kind, model)
    with torch.no_grad():
        torch.testing.assert_close(loss(fast, given), loss(model.eval(), given), rtol=1e-4, atol=1e-4)


@in_turn("kind", EACH)
def test_checkpoints_bring_the_same_masks_back(kind: str) -> None:
    model, other = pruned(kind), EVERY[kind]()
    other.load_state_dict(model.state_dict())
    derived = masks.derive(other, "2:4")
    assert {name: mask.pattern.name for name, mask in derived.items()} == dict.fromkeys(masks.of(model), "2:4")
    assert all(torch.equal(mask.keep, masks.of(model)[name].keep) for name, mask in derived.items())
    masks.detach(other)
    masks.load_state_dict(other, masks.state_dict(model))
    assert all(torch.equal(mask.keep, masks.of(model)[name].keep) for name, mask in masks.of(other).items())
    # Other zeros along the right axis bring their own mask; the old one is not laid over them.
    third = pruned(kind)
    for parameter in third.parameters():
        parameter.data = parameter.data.flip(tuple(range(parameter.ndim)))
    model.load_state_dict(third.state_dict())
    assert_sparse(model)


def test_a_recurrent_layer_keeps_its_flat_weights() -> None:
    model = pruned("lstm")
    for name, flat in zip(model._flat_weights_names, model._flat_weights, strict=True):
        assert flat is getattr(model, name)
    model.flatten_parameters()
    model.double()
    assert_sparse(model)
    model.load_state_dict(pruned("lstm").state_dict(), assign=True)
    assert all(
        flat is getattr(model, name) for name, flat in zip(model._flat_weights_names, model._flat_weights, strict=True)
    )


def test_a_compiled_training_step_over_attention() -> None:
    model = pruned("fused")
    step = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        loss(step, inputs("fused", model)).backward()
        optimizer.step()
    assert_sparse(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(ids)))


def test_a_tied_head_is_pruned_when_a_rule_names_it(tmp_path: Path) -> None:
    assert list(masks.of(twofour.prune(Tied(), "2:4"))) == ["body.weight"]
    assert list(masks.of(twofour.prune(Tied(), {"h*": "dense", "*": "2:4"}))) == ["body.weight"]
    model = twofour.prune(Tied(), {"head": "2:4", "*": "2:4"})
    assert sorted(masks.of(model)) == ["body.weight", "head.weight"]
    ids, path = torch.arange(8), tmp_path / "tied.safetensors"
    optimizer = torch.optim.Adam(model.parameters())
    model(ids).square().sum().backward()
    optimizer.step()
    assert_sparse(model)
    twofour.save(model, path)
    other = twofour.load(path, Tied(), masked=True)
    assert_sparse(other)
    assert sorted(masks.of(other)) == ["body.weight", "head.weight"] and other.head.weight is other.tokens.weight
    fast = twofour.compile(model, ids, tokens=(8,))
    with torch.no_grad():
        torch.testing.assert_close(fast(ids), model(ids), rtol=1e-4, atol=1e-5)
    masks.detach(other)
    assert "head.weight" in masks.load_state_dict(other, masks.state_dict(model))


def test_a_weight_packed_along_another_axis_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    twofour.save(twofour.prune(nn.Linear(16, 16, bias=True), "2:4"), path)
    with pytest.raises(FormatError, match=r"`weight` is packed along axis 1; the reduction axis is 0"):
        twofour.load(path, Conv1D(16, 16))


def test_named_tensors_with_the_input_first() -> None:
    model = pruned("hf_conv1d")
    weights = {"w": model.weight.detach()}
    wrong = checker.check_weights(weights, expect="2:4")
    assert not wrong.ok and "wrong axis" in wrong.layers[0].verdict
    assert checker.check_weights(weights, expect="2:4", axes={"w": 0}).ok
    broken = weights["w"].clone()
    broken[4:8, 3] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    (found,) = checker.check_weights({"w": broken}, expect="2:4", axes={"w": 0}).layers
    assert found.first == (4, 3) and found.values == (1.0, 2.0, 3.0, 4.0) and found.kind == "hf_conv1d"
