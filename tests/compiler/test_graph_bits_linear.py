"""Linears of low bits in a graph: codes are handed on to the bit, and what stands between is no call of its own."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.of_bits import whole
from twofour import quantization
from twofour.compiler.graph_bits_linear import LINEAR_CODES
from twofour.compiler.timed import held_by_program

pytestmark = pytest.mark.usefixtures("codes_win")

BETWEEN = {
    "relu": lambda: (nn.ReLU(),),
    "in place": lambda: (nn.ReLU(inplace=True), nn.Dropout()),
    "norm": lambda: (normed(nn.BatchNorm1d(33)), nn.ReLU6()),
    "gelu": lambda: (nn.GELU(),),
    "tanh": lambda: (nn.GELU(approximate="tanh"), nn.Dropout(0.3)),
    "silu": lambda: (normed(nn.BatchNorm1d(33, affine=False)), nn.SiLU()),
    "nothing": lambda: (),
    "several": lambda: (nn.Hardtanh(-2.0, 3.0), nn.Sigmoid()),
}

BY_OTHER_CODE = "tanh", "silu", "several"
"""Of whose activations torch computes the last numel % 32 numbers otherwise, in the last bits."""


@pytest.fixture(autouse=True)
def _graph_wins(no_measuring) -> None:
    """Nothing is timed."""


def normed(norm: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.Module:
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


def compiled(model: nn.Module, widths: str, x: torch.Tensor, data: bool = True, **how: Any) -> Any:
    at = max(widths.rfind(letter) for letter in "asb")
    twofour.quantize(model.eval(), widths[:at], widths[at:], data=[x] if data else None, ends=None, **how)
    return twofour.compile(model, x, tokens=(len(x),), graph=True)


def same(fast: nn.Module, model: nn.Module, x: torch.Tensor) -> bool:
    return torch.equal(fast(x).nan_to_num(7.0), whole(model, x).nan_to_num(7.0))


@pytest.mark.parametrize(
    ("widths", "between"),
    [
        *(
            ("w1a1", "relu"),
            ("w1a2", "in place"),
            ("w2a2", "norm"),
            ("w1.58a8", "gelu"),
            ("w4a8", "gelu"),
            ("w4a4", "tanh"),
        ),
        *(
            ("w3a5", "silu"),
            ("w2a3", "gelu"),
            ("w1a6", "several"),
            ("w8a7", "norm"),
            ("w8a8", "nothing"),
            ("b3s4", "relu"),
        ),
        *(("w2b2", "silu"), ("w4a8", "relu"), ("w5s8", "tanh"), ("b2b4", "several")),
    ],
)
def test_codes_between_linears_give_the_bits_of_the_whole_numbers(widths: str, between: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(71, 33), *BETWEEN[between](), nn.Linear(33, 50), nn.ReLU(), nn.Linear(50, 5))
    names = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
    fast = compiled(model, widths, torch.randn(40, 71))
    assert all(held.runs is not None for held in quantization.of(fast).values())
    account, layers = fast.plan.account, {layer.name: layer.reason for layer in fast.plan.layers}
    assert account.engine == "graph" and account.rewrites[LINEAR_CODES] == 2 and fast.plan.calls.native == 3
    bits = quantization.of(model)[names[1]].widths.inputs.bits  # type: ignore[union-attr]
    for name, reader in itertools.pairwise(names):
        assert layers[name].endswith(f"; hands codes of {bits} bits to `{reader}`")
    assert "hands codes" not in layers[names[-1]]
    tokens, few = (320, 32) if between in BY_OTHER_CODE else (301, 1)
    x = 2 * torch.randn(tokens, 71)
    x[3, 70], x[300, 0], x[7, 1] = float("nan"), float("nan"), float("inf")
    assert same(fast, model, x) and fast(x)[[3, 300]].isnan().all() and fast(x).isnan().any(1).sum() == 2
    for some in (x[:few], x[2 : 2 + 2 * few], x[:0]):
        assert same(fast, model, some)


@pytest.mark.parametrize("widths", ["w4a8", "w2a4"])
def test_groups_and_more_axes_hand_codes_on(widths: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    fast, x = compiled(model, widths, torch.randn(2, 9, 64), group=32), torch.randn(3, 5, 64)
    x[1, 2, 3] = float("nan")
    assert fast.plan.account.rewrites[LINEAR_CODES] == 1 and same(fast, model, x)
    assert fast(x).isnan().any(-1).sum() == 1
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert again.plan.account.engine == "graph" and same(again, model, x)
    with torch.no_grad():
        for one in (fast, model):
            one[2].input_step.mul_(1.5)  # type: ignore[index, operator, union-attr]
    assert same(fast, model, x)  # by the layers


class Branches(nn.Module):
    """Two Linears read one, whose answer is added besides where asked for."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.first, self.residual = nn.Linear(40, 24), residual
        self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        return self.a(y) + (y if self.residual else self.b(y))


@pytest.mark.parametrize(
    ("residual", "steps", "why"), [(False, 1.0, ""), (False, 2.0, "several ranges"), (True, 1.0, None)]
)
def test_several_linears_read_codes_of_one_range(residual: bool, steps: float, why: str | None) -> None:
    torch.manual_seed(0)
    model: Any = Branches(residual).eval()
    x = torch.randn(30, 40)
    twofour.quantize(model, "w4", "a8", data=[x], ends=None)
    model.b.input_step.data.mul_(steps) if not residual else None
    fast: Any = twofour.compile(model, x, tokens=(30,), graph=True)
    account = fast.plan.account
    assert account.engine == "graph" and account.rewrites[LINEAR_CODES] == (why == "") and same(fast, model, x)
    assert any(
        "codes of `first` to `a`, `b`: inputs of several ranges" in one for one in account.not_rewritten
    ) is bool(why)
    if why == "":
        assert fast.plan.layers[0].reason.endswith("; hands codes of 8 bits to `a`, `b`")
    assert not any(one.operator.startswith("relu") for one in account.after), account.after


@pytest.mark.parametrize("swallows", [torch.nan_to_num, torch.sign])
def test_what_makes_numbers_of_nan_stays_between(swallows: Any) -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(40, 24), nn.Linear(24, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(swallows(self.first(x)))

    torch.manual_seed(0)
    model, x = Between(), torch.randn(30, 40)
    fast = compiled(model, "w4a8", x)
    x[3, 5] = float("nan")
    said = ("codes of `first` to `last`: what stands between makes numbers of NaN",)
    assert fast.plan.account.engine == "graph" and fast.plan.account.not_rewritten == said
    assert same(fast, model, x) and fast(x).isfinite().all()


@pytest.mark.parametrize("channels", [24, 6])
def test_normalisations_of_images_stay_behind_a_linear(channels: int) -> None:
    """Their channels are not the outputs of the Linear, as many as they may be; Linears behind it hand codes on."""
    torch.manual_seed(0)
    norm = normed(nn.BatchNorm2d(channels))
    behind = nn.ReLU(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 8)
    model, x = nn.Sequential(nn.Linear(40, 24), norm, *behind), torch.randn(2, channels, 5, 40)
    fast = compiled(model, "w4a8", x)
    account = fast.plan.account
    assert account.engine == "graph" and account.rewrites[LINEAR_CODES] == 1 and fast.plan.calls.native == 4
    assert account.not_rewritten == () and fast.plan.layers[1].reason.endswith("; hands codes of 8 bits to `5`")
    torch.testing.assert_close(fast(x), whole(model, x), atol=0.05, rtol=0.05)


def test_a_linear_that_is_called_twice_names_the_readers_of_both_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b = nn.Linear(40, 24), nn.Linear(24, 8), nn.Linear(24, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(torch.relu(self.first(x))) + self.b(torch.relu(self.first(-x)))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(30, 40)
    fast = compiled(model, "w4a8", x)
    assert fast.plan.account.rewrites[LINEAR_CODES] == 2 and same(fast, model, x)
    assert fast.plan.layers[0].reason.endswith("; hands codes of 8 bits to `a`, `b`")


@pytest.mark.parametrize(("act", "label"), [(nn.ReLU, "relu"), (nn.GELU, "gelu"), (nn.SiLU, "silu")])
def test_activations_between_ranges_of_tokens_are_part_of_the_product(act: Any, label: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 24), act(), nn.Linear(24, 8)).eval(), torch.randn(30, 40)
    fast = compiled(model, "w4a8", x, data=False)
    account = fast.plan.account
    assert account.rewrites[LINEAR_CODES] == 0 and fast.plan.calls.native == 2
    assert account.not_rewritten == ("codes of `0` to `2`: inputs without a learned step",)
    assert {one.operator for one in account.after} == {f"linear of bits+{label}", "linear of bits"}
    torch.testing.assert_close(fast(x), whole(model, x), atol=0.05, rtol=0.05)
    if label == "relu":
        assert same(fast, model, x)


class Residual(nn.Module):
    """Sums and products behind Linears: of a residual stream, a gate, two Linears; in place, and some that stay."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "residual":
            return x + self.last(torch.relu(self.first(x)))
        if self.kind == "gate":
            return torch.relu(self.first(x)) * self.last(x)
        if self.kind == "two":
            return self.first(x) + self.last(x + 1)
        if self.kind == "in place":
            y = self.last(x)
            y += x
            return y
        if self.kind == "into the other":
            y = x + 1
            y += self.last(x)
            return y
        y = self.last(x)
        if self.kind == "read twice":
            return y + x, y
        return {"broadcast": lambda: y + x[:, :1], "itself": lambda: y + y, "alpha": lambda: torch.add(y, x, alpha=2)}[
            self.kind
        ]()


TAKEN = {
    "residual": {"linear of bits+relu", "linear of bits+add"},
    "gate": {"linear of bits", "linear of bits+relu+multiply"},
    "two": {"linear of bits", "linear of bits+add"},
    "in place": {"linear of bits+add"},
    "into the other": {"linear of bits+add"},
}
"""What the account names, of those that are part of a product."""


def assert_same_bits(fast: Any, model: nn.Module, x: torch.Tensor) -> None:
    """Hold the answers to the example, to other tokens and to no numbers against those in whole numbers."""
    negated = torch._neg_view(torch.randn(x.shape))  # as the imaginary part of a conjugate is
    for given in (x, torch.randn(x.shape), torch.full(x.shape, float("nan")), negated):
        with quantization.in_whole_numbers(model):
            want = model(given)
        got = fast(given)
        for one, other in zip(*((a if isinstance(a, tuple) else (a,)) for a in (got, want)), strict=True):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("kind", [*TAKEN, "read twice", "broadcast", "itself", "alpha"])
def test_sums_and_products_behind_a_real_answer_are_part_of_the_product(kind: str, data: bool) -> None:
    torch.manual_seed(0)
    model, x = Residual(kind).eval(), torch.randn(30, 40)
    fast = compiled(model, "w1.58a8", x, data=data)
    account = fast.plan.account
    assert account.engine == "graph"
    names = {one.operator for one in account.after if one.operator.startswith("linear of bits")}
    if not (kind == "residual" and data):  # then the first one hands codes on
        assert names == TAKEN.get(kind, {"linear of bits"})
    else:
        assert names == {"linear of bits+relu to codes", "linear of bits+add"}
    assert_same_bits(fast, model, x)


class Dropped(nn.Module):
    """A residual sum or a gate behind one Linear, with dropout at the places that `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.drop = kind, nn.Linear(40, 40), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        y, drop = self.linear(x), self.drop
        if self.kind == "answer read twice":
            y = drop(y)
            return y + x, y
        if self.kind == "activation read twice":
            y = drop(torch.relu(y))
            return y * x, y
        if self.kind == "two":
            return drop(y) + drop(self.linear(x + 1))
        if self.kind == "in place":
            y = drop(y)
            y += x
            return y
        return {
            "sum": lambda: drop(y) + x,
            "gate": lambda: x * drop(y),
            "behind the activation": lambda: drop(torch.relu(y)) + x,
            "before the activation": lambda: torch.relu(drop(y)) + x,
            "activation alone": lambda: drop(torch.relu(drop(y))),
            "twice": lambda: x + drop(drop(y)),
            "everywhere": lambda: drop(drop(torch.relu(drop(drop(y))))) * x,
            "two activations": lambda: drop(torch.relu(drop(torch.relu(y)))) + x,
        }[self.kind]()


DROPPED = {
    "sum": {"linear of bits+add"},
    "gate": {"linear of bits+multiply"},
    "in place": {"linear of bits+add"},
    "two": {"linear of bits", "linear of bits+add"},
    "behind the activation": {"linear of bits+relu+add"},
    "before the activation": {"linear of bits+relu+add"},
    "activation alone": {"linear of bits+relu"},
    "twice": {"linear of bits+add"},
    "everywhere": {"linear of bits+relu+multiply"},
    "two activations": {"linear of bits+relu"},
    "answer read twice": {"linear of bits"},
    "activation read twice": {"linear of bits+relu"},
}
"""What the account names, of those that are part of a product."""


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("kind", DROPPED)
def test_dropout_outside_training_hides_nothing_from_the_product(kind: str, data: bool) -> None:
    torch.manual_seed(0)
    model, x = Dropped(kind).eval(), torch.randn(30, 40)
    fast = compiled(model, "w4a8", x, data=data)
    account = fast.plan.account
    assert account.engine == "graph"
    assert {one.operator for one in account.after if one.operator.startswith("linear of bits")} == DROPPED[kind]
    assert_same_bits(fast, model, x)


@pytest.mark.parametrize("data", [False, True])
def test_output_products_of_an_encoder_with_dropout_add_the_stream(data: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    config = transformers.BertConfig(**sizes, vocab_size=50, hidden_act="relu")
    model, words = transformers.BertModel(config, add_pooling_layer=False).eval(), torch.randint(50, (2, 16))
    twofour.quantize(model, "w4", "a8", data=[words] if data else None, ends=None)
    fast: Any = twofour.compile(model, words, tokens=(32,), graph=True)
    assert fast.plan.account.engine == "graph"
    sums = [one for one in fast.plan.account.outlines["after"].calls if one.label == "linear of bits+add"]
    assert len(sums) == 4  # of each block, behind its attention and behind its activation
    with quantization.in_whole_numbers(model), torch.no_grad():
        torch.testing.assert_close(fast(words)[0], model(words)[0], atol=1e-4, rtol=1e-4)


def test_what_torch_rounds_to_and_fro_stays_real_and_the_plan_says_so() -> None:
    """Far below zero torch's GELU is 0 or not from float to float; of odd levels that is another code."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(71, 33), nn.GELU(), nn.Linear(33, 5)), torch.randn(40, 71)
    account = compiled(model, "w2b2", x).plan.account
    assert account.not_rewritten == ("codes of `0` to `2`: what stands between changes codes to and fro",)


def test_what_no_table_holds_stays_real_and_the_plan_says_so() -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(40, 24), nn.Linear(24, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.sin(self.first(x) * 3e4))

    torch.manual_seed(0)
    model, x = Wave(), torch.randn(30, 40)
    fast = compiled(model, "w4a8", x)
    assert "codes of `first` to `last`: what stands between changes codes too" in fast.plan.account.not_rewritten[0]


def test_times_are_of_what_a_call_does_beside_its_product() -> None:
    """Programs of one text and one model's weights: activation, bits of the codes, and convolutions, decide besides."""
    kept: dict[str, set[str]] = {}
    for act, widths in ((nn.GELU, "w4a8"), (nn.SiLU, "w4a8"), (nn.GELU, "w4a4"), (nn.Sigmoid, "w4a8")):
        model = nn.Sequential(nn.Linear(40, 33), act(), nn.Linear(33, 24))
        program = compiled(model, widths, torch.randn(40, 40)).forward.program.python
        kept.setdefault(program.text, set()).add(repr(held_by_program(program)))
    for inputs in ("a2", "a3"):
        images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1))
        program = compiled(images, f"w2{inputs}", torch.randn(2, 3, 6, 6)).forward.program.python
        kept.setdefault(program.text, set()).add(repr(held_by_program(program)))
    assert sorted(map(len, kept.values())) == [2, 4]
