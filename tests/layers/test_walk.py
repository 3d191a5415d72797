"""What a walk finds, what it leaves and the reason it gives."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.turns import in_turn
from twofour import layers
from twofour.errors import LayerError


def reasons(model: nn.Module, **options: object) -> dict[str, str]:
    return {skipped.name: skipped.reason for skipped in layers.walk(model, **options).skipped}


def names(model: nn.Module, **options: object) -> list[str]:
    return [weight.name for weight in layers.walk(model, **options).weights]


@pytest.mark.parametrize(
    ("layer", "kind", "rows", "reduction", "shape"),
    [
        (nn.Linear(32, 8), "linear", 8, 32, (8, 32)),
        (nn.Conv1d(16, 8, 3), "conv1d", 24, 16, (8, 3, 16)),
        (nn.Conv2d(32, 8, (3, 2), groups=2), "conv2d", 48, 16, (8, 3, 2, 16)),
    ],
    ids=["linear", "conv1d", "conv2d-grouped"],
)
def test_the_reduction_axis_comes_last(layer: nn.Module, kind: str, rows: int, reduction: int, shape: tuple) -> None:
    (weight,) = layers.walk(layer).weights
    assert (weight.kind, weight.rows, weight.reduction) == (kind, rows, reduction)
    assert weight.parameter is layer.weight
    last = weight.reduction_last(layer.weight)
    assert last.shape == shape and last.data_ptr() == layer.weight.data_ptr()
    assert torch.equal(weight.from_reduction_last(last), layer.weight)
    # The last axis is the one that an output sums over: only the input channel moves along it.
    position = (3, *(0 for _ in shape[1:-1]), 5)
    assert last[position] == layer.weight[(3, 5, *(0 for _ in shape[1:-1]))]


def test_each_other_weight_has_a_reason() -> None:
    model = nn.ModuleDict(
        {
            "stem": nn.Conv2d(3, 16, 3),
            "depthwise": nn.Conv2d(16, 16, 3, groups=16),
            "head": nn.Linear(16, 10),
            "wide": nn.Linear(770, 16),
            "tokens": nn.Embedding(16, 16),
            "norm": nn.LayerNorm((4, 16)),
            "up": nn.ConvTranspose2d(16, 12, 2),
            "volume": nn.Conv3d(16, 16, 1, groups=2),
            "gru": nn.GRU(20, 12),
            "pair": nn.Bilinear(16, 16, 8),
            "good": nn.Linear(16, 8),
            "scale": nn.BatchNorm1d(8),
        }
    )
    found = reasons(model)
    assert names(model) == ["good.weight"]
    assert found["stem.weight"] == "in_channels 3 is not a multiple of 16 (ASP's rule)"
    assert found["depthwise.weight"] == "in_channels / groups 1 is not a multiple of 16 (ASP's rule)"
    assert found["head.weight"] == "out_features 10 is not a multiple of 8 (ASP's rule)"
    assert found["wide.weight"] == "in_features 770 is not a multiple of 16 (ASP's rule)"
    assert found["tokens.weight"] == "an embedding: its rows are looked up, not multiplied"
    assert found["norm.weight"] == "a normalisation weight"
    assert found["up.weight"] == "out_channels 12 is not a multiple of 8 (ASP's rule)"
    assert found["volume.weight"] == "in_channels / groups 8 is not a multiple of 16 (ASP's rule)"
    assert found["gru.weight_ih_l0"] == "input width 20 is not a multiple of 16 (ASP's rule)"
    assert found["pair.weight"].startswith("Bilinear is not a supported kind of layer (Linear, Conv1d to Conv3d, Conv")
    every = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    assert {*found, *names(model)} == every


def test_any_leaves_the_choice_to_the_pattern() -> None:
    model = nn.Sequential(nn.Linear(770, 10), nn.Conv2d(3, 5, 3), nn.Embedding(4, 4))
    assert names(model, eligibility="any") == ["0.weight", "1.weight"]
    assert names(model) == []


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Standardised(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean(), bias)


class SameForward(nn.Linear):
    """Adds nothing to the computation."""


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return super().forward(*args, **kwargs)[0]


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(16, 32)), nn.Linear(16, 32)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up.weight @ self.down


def low_rank() -> nn.Module:
    layer = nn.Linear(32, 32)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", LowRank())
    return layer


def replaced_forward() -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(nn.Linear(32, 32))


@in_turn(
    ("make", "reason"),
    [
        (lambda: OwnForward(32, 32), "OwnForward has a forward of its own"),
        (lambda: Standardised(16, 16, 3), "Standardised has a _conv_forward of its own"),
        (replaced_forward, "its forward was replaced on the instance"),
        (old_weight_norm, "weight-normed: the weight is computed from weight_g and weight_v"),
        (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), "parametrised"),
        (lambda: torch.nn.utils.spectral_norm(nn.Linear(32, 32)), "the weight is computed from weight_orig"),
        (lambda: nn.LazyLinear(32), "a lazy layer without a shape yet: run one batch first"),
        (lambda: nn.Linear(32, 32, device="meta"), "on the meta device: it has no values"),
        (lambda: nn.Linear(32, 32, dtype=torch.complex64), "dtype complex64 is not a real floating type"),
        (lambda: nn.Linear(32, 32).to(torch.float8_e4m3fn), "dtype float8_e4m3fn is not"),
        (lambda: OwnAttention(32, 2), "OwnAttention has a forward of its own"),
        (lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)), r"parametrised \(SpectralNorm\)"),
        (lambda: low_rank(), r"parametrised \(LowRank\): .*remove_parametrizations|part of a parametrisation"),
        (lambda: nn.ModuleDict({"lora_A": nn.Linear(32, 32)}), r"a low-rank adapter \(LoRA\): merge it"),
    ],
)
def test_layers_whose_weight_is_not_what_is_multiplied(make: Callable[[], nn.Module], reason: str) -> None:
    layer = make()
    found = reasons(layer, eligibility="any")
    assert found and names(layer, eligibility="any") == []
    assert all(re.search(reason, text) for text in found.values()), found


def test_a_subclass_that_keeps_the_forward_is_prunable() -> None:
    assert names(SameForward(32, 32)) == ["weight"]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_weights_without_usable_values() -> None:
    model = nn.Sequential(nn.Linear(0, 8), nn.Linear(16, 8), nn.Linear(16, 8))
    model[1].weight = nn.Parameter(torch.ones(8, 16, dtype=torch.int8), requires_grad=False)
    model[2].weight = nn.Parameter(torch.eye(8, 16).to_sparse(), requires_grad=False)
    assert reasons(model) == {
        "0.weight": "shape (8, 0) has no values",
        "1.weight": "dtype int8 is not a real floating type that can be ranked",
        "2.weight": "stored as torch.sparse_coo",
    }


def test_a_tied_weight_is_found_once_with_its_aliases() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    (weight,) = layers.walk(model).weights
    assert (weight.name, weight.layer, weight.aliases) == ("0.weight", "0", ("1.weight",))


def test_a_weight_shared_with_an_embedding_is_left_alone() -> None:
    model = nn.ModuleDict({"head": nn.Linear(32, 64, bias=False), "tokens": nn.Embedding(64, 32)})
    model["tokens"].weight = model["head"].weight
    found = (
        "shared with `tokens.weight`: an embedding: its rows are looked up, not multiplied; "
        'a rule that names it, {"head": ...}, prunes both'
    )
    assert reasons(model) == {"head.weight": found} and names(model) == []
    turned = nn.ModuleDict({"tokens": model["tokens"], "head": model["head"]})
    assert reasons(turned) == {"head.weight": found}
    (weight,) = layers.walk(turned, tied=["head"]).weights
    assert (weight.name, weight.aliases, weight.module) == ("head.weight", ("tokens.weight",), model["head"])
    assert names(nn.ModuleDict({"lm": turned}), tied="*") == ["lm.head.weight"]


def test_tied_weights_that_sum_over_different_axes_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.ConvTranspose2d(16, 16, 1))
    model[1].weight = model[0].weight
    assert reasons(model) == {"0.weight": "shared with `1.weight`, whose product sums over another axis"}


def test_different_parameters_over_the_same_memory_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    assert names(model) == ["2.weight"]
    assert reasons(model) == {
        "0.weight": "shares memory with `1.weight` without being the same Parameter",
        "1.weight": "shares memory with `0.weight` without being the same Parameter",
    }


def test_skip_names_layers_by_glob_and_what_is_inside_them() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "head": nn.Linear(16, 16)})
    assert names(model, skip=["head"]) == ["body.0.weight", "body.1.weight"]
    assert names(model, skip="head") == ["body.0.weight", "body.1.weight"]
    assert names(model, skip=["body"]) == ["head.weight"]
    assert names(model, skip=["*.1"]) == ["body.0.weight", "head.weight"]
    assert reasons(model, skip=["h*"]) == {"head.weight": "left out by skip='h*'"}


@in_turn(
    ("glob", "layer", "expected"),
    [
        ("encoder.*.fc1", "encoder.0.fc1", True),
        ("encoder.*.fc1", "encoder.0.block.fc1", True),
        ("encoder", "encoder.0.fc1", True),
        ("*", "", True),
        ("enc", "encoder.0", False),
        ("fc1", "encoder.0.fc1", False),
    ],
)
def test_globs(glob: str, layer: str, expected: bool) -> None:
    assert layers.matches(glob, layer) is expected


def test_wrong_options_say_what_is_wanted() -> None:
    model = nn.ModuleDict({"classifier": nn.Linear(16, 16)})
    with pytest.raises(LayerError, match=r"matches no layer\n  got .*\n.*\n  try +nearest names: `classifier`"):
        layers.walk(model, skip=["classifer"])
    for empty in ("", [""], ["classifier", ""]):
        with pytest.raises(LayerError, match=r"matches no layer\n  got +''\n.*\n  try +nearest names: `classifier`"):
            layers.walk(model, skip=empty)
    assert not layers.walk(nn.Linear(16, 16), skip="").weights  # a single layer is a model whose name is none
    with pytest.raises(LayerError, match=r'eligibility rule is unknown\n  got +\'ASP\'\n  wanted  "asp" or "any"'):
        layers.walk(model, eligibility="ASP")


@pytest.mark.parametrize(
    ("model", "got"), [(None, "NoneType"), (3, "int"), ({}, "dict"), (nn.Linear, "the class Linear")]
)
def test_what_is_no_module_is_refused(model: object, got: str) -> None:
    for call in (layers.walk, layers.reduction_axes):
        with pytest.raises(LayerError, match=f"there is no model\n  got     {got}\n"):
            call(model)  # pyright: ignore[reportArgumentType]


def test_a_transposed_convolution_with_groups_is_seen_by_its_outputs() -> None:
    layer = nn.ConvTranspose2d(8, 6, (3, 2), groups=2)
    (weight,) = layers.walk(layer, eligibility="any").weights
    seen = weight.reduction_last(layer.weight)
    assert seen.shape == (6, 3, 2, 4) and (weight.rows, weight.reduction) == (36, 4)
    assert torch.equal(weight.from_reduction_last(seen), layer.weight)
    x = torch.zeros(1, 8, 1, 1)
    for out, tap, channel in ((1, (0, 1), 2), (4, (2, 0), 3)):
        x.zero_()[0, channel + (4 if out >= 3 else 0)] = 1  # the second three outputs read the second four channels
        moved = layer(x)[0, out, tap[0], tap[1]] - layer.bias[out]
        torch.testing.assert_close(moved, seen[out, *tap, channel])
        assert (
            layer.weight[weight.axis.stored((out, *tap, channel), tuple(layer.weight.shape))]
            == seen[out, *tap, channel]
        )
