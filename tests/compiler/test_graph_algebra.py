"""compile rewrites the graph by algebra: what the plan says of it, and that sparse weights are never merged."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import quick
from twofour.compiler.compilation import compilation_of
from twofour.compiler.whole_model import WholeModel
from twofour.errors import CompileError

pytestmark = pytest.mark.usefixtures("no_measuring")


@pytest.fixture(autouse=True)
def always_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the model is faster than it was is for a quiet machine to say."""
    module = importlib.import_module("twofour.compiler.compile")
    monkeypatch.setattr(module, "never_slower", lambda fast, plan, *_: plan)


class LoRA(nn.Module):
    """A linear layer with two adapters that were not merged, as peft leaves them."""

    def __init__(self, width: int = 64, ranks: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.ModuleList(nn.Linear(width, ranks, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(ranks, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        for down, up in zip(self.down, self.up, strict=True):
            result = result + up(down(x)) * 0.5
        return result


class Narrow(nn.Module):
    """Two layers in a row, wide between them; one of them is also read by itself."""

    def __init__(self, function: Callable[[Tensor], Tensor] = lambda x: x, seen: bool = False) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 8)
        self.function, self.seen = function, seen

    def forward(self, x: Tensor) -> Any:
        y = self.wide(x)
        return (self.narrow(self.function(y)), y) if self.seen else self.narrow(self.function(y))


def compiled(model: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    fast = quick(model.eval(), x, **options)
    assert isinstance(fast.__dict__.get("forward"), WholeModel), fast.plan.account
    for batch in (x, x[:1], torch.cat([x, x])):
        torch.testing.assert_close(fast(batch), model(batch), rtol=1e-4, atol=1e-5)
    return fast


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 10, 64)


def test_adapters_and_layers_in_a_row_are_merged_and_the_plan_says_so(x: Tensor) -> None:
    fast = compiled(nn.Sequential(LoRA(), nn.ReLU(), Narrow()), x)
    account = fast.plan.account
    assert account.rewrites["low rank into a weight"] == 2
    assert account.rewrites["linear layers in a row"] == 1
    assert account.rewrites["products by a weight"] == 2
    assert account.bounds["linear layers in a row"].startswith("(k + 2) u")
    assert account.not_rewritten == ()
    assert {"0.base.merged2", "2.narrow.merged"} <= {layer.name for layer in fast.plan.layers}
    assert "error of linear layers in a row: (k + 2) u" in str(fast.plan)
    assert fast.plan.to_dict()["account"]["bounds"] == account.bounds  # type: ignore[index]


def test_sparse_weights_are_not_merged_and_the_plan_says_why(x: Tensor) -> None:
    model = twofour.prune(nn.Sequential(LoRA(), nn.ReLU(), Narrow()), "2:4", eligibility="any")
    account = compiled(model, x).plan.account
    assert not {"low rank into a weight", "linear layers in a row"} & set(account.rewrites)
    line = next(line for line in account.not_rewritten if line.startswith("linear layers in a row"))
    assert "`2.narrow.weight` is 2:4" in line or "`2.narrow` is 2:4" in line
    assert "twofour.simplify(model, example)" in line


class LayerScale(nn.Module):
    """A residual layer with a factor for each channel, as ConvNeXt and CaiT have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(64, 64), nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.layer(x)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_layer_scale_goes_into_a_sparse_weight_too(x: Tensor, sparse: bool) -> None:
    model: nn.Module = nn.Sequential(LayerScale(), nn.ReLU(), LayerScale())
    model = twofour.prune(model, "2:4", eligibility="any") if sparse else model
    fast = compiled(model, x)
    assert fast.plan.account.rewrites["vector into a weight"] == 2
    assert fast.plan.account.rewrites["sums and gates into products"] == 2
    packed = [layer.sparse_ms is not None for layer in fast.plan.layers if "merged" in layer.name]
    assert packed == [sparse] * 2, fast.plan


def test_a_dense_adapter_beside_a_sparse_weight_stays_beside_it(x: Tensor) -> None:
    model = twofour.prune(LoRA(), {"base": "2:4", "*": "dense"})
    fast = compiled(model, x)
    assert fast.plan.account.rewrites.get("low ranks joined") == 1
    assert "low rank into a weight" not in fast.plan.account.rewrites
    assert any("base` is 2:4" in line or "base.weight` is 2:4" in line for line in fast.plan.account.not_rewritten)


def test_what_is_read_beside_stays_and_what_stands_between_too(x: Tensor) -> None:
    account = compiled(Narrow(seen=True), x).plan.account
    assert account.rewrites["products by a weight"] == 2
    assert "linear layers in a row" not in compiled(Narrow(torch.relu), x).plan.account.rewrites


def test_small_memory_keeps_no_second_copy(x: Tensor) -> None:
    fast = quick(Narrow().eval(), x, memory="small")
    assert any("memory='small'" in line for line in fast.plan.account.not_rewritten)
    assert "linear layers in a row" not in fast.plan.account.rewrites


def test_a_weight_in_another_type_is_not_rounded_twice(x: Tensor) -> None:
    account = quick(Narrow().eval(), x, dtype="bfloat16").plan.account
    assert "linear layers in a row" not in account.rewrites or not account.not_rewritten


class LogSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.prod(torch.exp(self.layer(x)), -1)


def test_close_rules_wait_until_they_are_allowed(x: Tensor, tmp_path: Path) -> None:
    exact = compiled(LogSum(), 0.1 * x)
    assert "product of exponentials" not in exact.plan.account.rewrites
    assert any('rules="close"' in line for line in exact.plan.account.not_rewritten)
    model = LogSum()
    fast = compiled(model, 0.1 * x, rules="close")
    assert fast.plan.account.rewrites["product of exponentials"] == 1
    assert fast.plan.rules == "close"
    twofour.save(fast, tmp_path / "m.safetensors")
    loaded = twofour.load(tmp_path / "m.safetensors", LogSum(), example=0.1 * x)
    settings = compilation_of(loaded)
    assert settings is not None and settings.rules == "close"
    assert loaded.plan.account.rewrites["product of exponentials"] == 1
    torch.testing.assert_close(loaded(0.1 * x), model(0.1 * x), rtol=1e-4, atol=1e-5)


def test_rules_that_do_not_exist_or_have_no_graph(x: Tensor) -> None:
    with pytest.raises(CompileError, match="the rules are not known"):
        twofour.compile(Narrow(), x, rules="fast")
    with pytest.raises(CompileError, match="needs a graph"):
        twofour.compile(Narrow(), rules="close")
    with pytest.raises(CompileError, match="needs a graph"):
        twofour.compile(Narrow(), x, graph=False, rules="close")
