"""Each rewrite on the smallest model it is for: how many places it changes, and that the answers stay."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.graph.small import Cached, Encoder, GatedBlock, PreNormBlock, RMSNorm
from tests.turns import in_turn
from twofour.capture import Graph, capture
from twofour.graph import Product, Program, arrange, fuse, lower_activations, simplify
from twofour.graph.base import aten
from twofour.graph.rules.fuse_convolutions import convolution_of


def captured(model: nn.Module, *inputs: Tensor) -> tuple[Graph, dict[str, int]]:
    names = list(torch.export.export.__annotations__) and list(model.forward.__code__.co_varnames[1 : len(inputs) + 1])
    graph = capture(model.eval(), dict(zip(names, inputs, strict=True)))
    return graph, {**simplify(graph.module), **fuse(graph.module)}


def products(graph: Graph) -> list[Product]:
    return [node.meta["product"] for node in graph.module.graph.nodes if "product" in node.meta]


def test_an_encoder_layer_becomes_seven_calls() -> None:
    graph, counts = captured(Encoder(layers=1), torch.randint(0, 50, (2, 9)), torch.ones(2, 9))
    assert counts["products of one input joined"] == 1
    assert counts["activations into products"] == 1
    assert counts["sums and gates into products"] == 2
    assert counts["attention fused"] == 1
    assert counts["normalisations fused"] == 3
    names = [(len(p.sources), p.epilogue.activation, p.epilogue.combine) for p in products(graph)]
    assert names == [(3, "none", "none"), (1, "none", "add"), (1, "gelu", "none"), (1, "none", "add")]
    assert not any("dropout" in str(node.target) for node in graph.module.graph.nodes)


def test_a_gated_block_takes_gate_and_residual_into_products() -> None:
    graph, counts = captured(GatedBlock(), torch.randn(2, 6, 64))
    assert counts["normalisations fused"] == 2
    assert counts["attention fused"] == 1
    kinds = {(p.epilogue.activation, p.epilogue.combine) for p in products(graph)}
    assert kinds == {("none", "none"), ("silu", "multiply"), ("none", "add")}


@pytest.mark.parametrize("given_back", [False, True])
@pytest.mark.parametrize("low", [False, True])
def test_a_cache_is_not_copied_for_the_next_token(given_back: bool, low: bool) -> None:
    graph, counts = captured(Cached(given_back), torch.randn(2, 1, 32), *torch.randn(2, 2, 4, 6, 8))
    assert counts["attention fused"] == 1
    if low:
        lower_activations(graph.module)
    assert arrange(graph.module)["heads read in place"] == 0
    joins = [node for node in graph.module.graph.nodes if node.target is torch.ops.aten.cat.default]
    assert len(joins) == (2 if given_back else 0)


def test_addmm_and_gelu_written_out() -> None:
    graph, counts = captured(PreNormBlock(), torch.randn(2, 6, 64))
    assert counts["GELU written out"] == 1
    assert counts["products by a weight"] == 4
    assert all(source.transposed for product in products(graph) for source in product.sources)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, RMSNorm])
def test_normalisations(kind: type[nn.Module]) -> None:
    model, x = kind(24).eval(), torch.randn(3, 24)
    graph = capture(model, {next(iter(["input" if kind is nn.LayerNorm else "x"])): x})
    simplify(graph.module)
    assert fuse(graph.module)["normalisations fused"] == 1
    torch.testing.assert_close(Program(graph.module)(x)[0], model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "scale",
    [
        lambda x: x.pow(2).mean(-1, keepdim=True, dtype=torch.float64) + 1e-6,
        lambda x: torch.add(x.pow(2).mean(-1, keepdim=True), 1e-6, alpha=1000),
        lambda x: torch.mean(x.pow(2), dim=None, keepdim=True) + 1e-6,
    ],
)
def test_a_normalisation_of_another_type_eps_or_axis_stays(scale: Callable[[Tensor], Tensor]) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(scale(x))

    x = 1e-2 * torch.randn(3, 24)
    graph, counts = captured(Scaled(), x)
    found, want = Program(graph.module)(x)[0], Scaled()(x)
    assert counts["normalisations fused"] == 0 and found.dtype is want.dtype
    torch.testing.assert_close(found, want)


def test_an_activation_that_others_see_stays() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x)
            return functional.relu(y), y

    graph, counts = captured(Seen(), torch.randn(2, 8))
    assert counts["activations into products"] == 0
    assert products(graph)[0].epilogue.plain


def test_a_sum_that_broadcasts_stays() -> None:
    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return self.layer(x) + other

    _, counts = captured(Broadcast(), torch.randn(3, 8), torch.randn(1, 8))
    assert counts["sums and gates into products"] == 0
    _, counts = captured(Broadcast(), torch.randn(3, 8), torch.randn(3, 8))
    assert counts["sums and gates into products"] == 1


def test_constants_are_computed_once() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(4).float().cos()

    graph, counts = captured(Constant(), torch.randn(3, 4))
    assert counts["constants folded"] == 1
    x = torch.randn(5, 4)
    torch.testing.assert_close(Program(graph.module)(x)[0], Constant()(x))


def test_a_table_of_weights_is_looked_up_once_and_a_weight_is_not_copied() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.matrix = nn.Parameter(torch.randn(169, 30)), nn.Parameter(torch.randn(96, 96))
            self.register_buffer("places", torch.randint(169, (400,)))

        def forward(self, x: Tensor) -> Tensor:
            bias = self.table[self.places].view(20, 20, 30).permute(2, 0, 1).contiguous().unsqueeze(0)
            return x + bias + (x.mean() * self.matrix.t().contiguous()).sum()

    model, x = Table(), torch.randn(3, 30, 20, 20)
    graph, counts = captured(model, x)
    targets = [node.target for node in graph.module.graph.nodes]
    assert counts["constants folded"] == 1 and aten.index.Tensor not in targets and aten.t.default in targets
    torch.testing.assert_close(Program(graph.module)(x)[0], model(x))


def test_a_pad_of_nothing_is_removed_unless_the_caller_gets_it() -> None:
    class Pads(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            pad = nn.functional.pad
            return pad(x, (0, 0, 0, 0)).relu(), pad(x, (0, 0)), pad(x, (0, 1)).relu()

    x = torch.randn(3, 4)
    graph, _ = captured(Pads(), x)
    assert sum(node.target is aten.pad.default for node in graph.module.graph.nodes) == 2
    found = Program(graph.module)(x)
    assert found[1].data_ptr() != x.data_ptr()
    for got, want in zip(found, Pads()(x), strict=True):
        assert torch.equal(got, want)


def test_what_the_caller_gets_is_no_constant_and_no_input() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Buffer(torch.arange(4.0))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = x.relu()
            fresh = self.table.clone(), self.table + 0, torch.tensor([1.0, 2.0]), torch.arange(4).float().cos()
            return (y, y.clone(), x.view(-1).clone(), self.table.view(2, 2).clone().t(), *fresh)

    x = torch.randn(3, 4)
    graph, _ = captured(Copies(), x)
    run = Program(graph.module)
    want = [leaf.clone() for leaf in run(x)]
    found = run(x)
    for leaf in found:
        leaf.add_(1)
    for got, first, again in zip(found, want, run(x), strict=True):
        torch.testing.assert_close(got, first + 1)
        torch.testing.assert_close(again, first)


class CopiedHeads(nn.Module):
    """Attention whose heads are changed on their way, as Whisper copies them: one function for each operand."""

    def __init__(self, *changes: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.changes, self.scale = changes, nn.Parameter(torch.rand(45))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = (part.unflatten(-1, (3, 5)).transpose(1, 2) for part in (x * self.scale).chunk(3, -1))
        q, k, v = (change(part) for change, part in zip(self.changes, parts, strict=True))
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return seen.contiguous().flatten(2), k


SAME: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t,
    lambda t: t.contiguous(),
    lambda t: t.clone(memory_format=torch.contiguous_format),
    lambda t: t.contiguous().clone(),
)


@pytest.mark.parametrize("turned", range(4))
def test_attention_reads_heads_through_their_copies(turned: int) -> None:
    model = CopiedHeads(*(SAME[(turned + i) % 4] for i in range(3)))
    graph, _ = captured(model, torch.randn(2, 7, 45))
    assert arrange(graph.module)["heads read in place"] == 1
    for shape in ((2, 7, 45), (1, 2, 45), (3, 66, 45)):
        x = torch.randn(shape)
        (found, keys), (want, wanted) = Program(graph.module)(x), model(x)
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(keys, wanted, atol=0, rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.contiguous() * 2,
        lambda t: t.contiguous().flip(2),
        lambda t: t.contiguous().transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: t.to(torch.float64).to(torch.float32),
    ],
)
def test_heads_that_change_on_their_way_are_read_where_they_end(change: Callable[[Tensor], Tensor]) -> None:
    model, x = CopiedHeads(SAME[1], change, SAME[1]), torch.randn(2, 7, 45)
    graph, _ = captured(model, x)
    assert arrange(graph.module)["heads read in place"] == 0
    torch.testing.assert_close(Program(graph.module)(x)[0], model(x)[0], atol=1e-5, rtol=1e-5)


HEADS: tuple[tuple[int, Callable[[Tensor], Sequence[Tensor]]], ...] = (
    (1, lambda y: [part.transpose(1, 2) for part in y.view(*y.shape[:2], 3, -1, 8).unbind(dim=-3)]),  # ModernBERT
    (1, lambda y: y.reshape(*y.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)),  # timm
    (3, lambda y: [y.reshape(*y.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)[i] for i in (0, -2, 2)]),  # torchvision
    (3, lambda y: [y.view(*y.shape[:2], 3, -1, 8)[:, :, i].transpose(1, 2) for i in range(3)]),  # einops
)


class Parts(nn.Module):
    """Attention of heads that a model takes from one product in a way of its own."""

    def __init__(self, heads: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.heads, self.weight = heads, nn.Parameter(torch.randn(16, 48) / 4)  # scores near 1: rounding stays rounding

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x @ self.weight)
        seen = functional.scaled_dot_product_attention(q, k, v)
        return seen.transpose(1, 2).reshape(x.shape)


@in_turn("count, heads", HEADS)
def test_parts_of_a_view_are_columns_that_attention_reads_in_place(
    count: int, heads: Callable[[Tensor], Sequence[Tensor]]
) -> None:
    model = Parts(heads)
    graph, counts = captured(model, torch.randn(2, 7, 16))
    assert counts["splits into views"] == count
    assert arrange(graph.module)["heads read in place"] == 1
    for shape in ((2, 7, 16), (3, 5, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(Program(graph.module)(x)[0], model(x), atol=1e-5, rtol=1e-5)


@in_turn("heads", [lambda y: y.view(*y.shape[:2], 2, 3, 8).unbind(3), lambda y: y.view(-1, 3, 2, 48).unbind(1)])
def test_parts_that_are_no_columns_side_by_side_stay(heads: Callable[[Tensor], Sequence[Tensor]]) -> None:
    model, x = Parts(heads), torch.randn(3, 4, 16)
    graph, counts = captured(model, x)
    assert counts["splits into views"] == 0
    torch.testing.assert_close(Program(graph.module)(x)[0], model(x), atol=1e-5, rtol=1e-5)


class Formula(nn.Module):
    """GELU's tanh formula, with a number that one of its additions multiplies what it adds by."""

    def __init__(self, inner: float, outer: float) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer

    def forward(self, x: Tensor) -> Tensor:
        cubed = torch.add(x, 0.044715 * torch.pow(x, 3.0), alpha=self.inner)
        return 0.5 * x * torch.add(torch.tanh(0.7978845608028654 * cubed), 1.0, alpha=self.outer)


@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (3, 1), (1, 2)])
def test_a_formula_with_other_factors_is_no_gelu(inner: int, outer: int) -> None:
    model, x = Formula(inner, outer), torch.randn(64)
    graph, counts = captured(model, x)
    assert counts["GELU written out"] == (inner == outer == 1)
    torch.testing.assert_close(Program(graph.module)(x)[0], model(x))


class PaddedChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(12, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.pad(x, (1, 1, 2, 2)))


def test_zeros_around_channels_are_none_around_an_image() -> None:
    model, x = PaddedChannels().eval(), torch.randn(2, 8, 18)
    graph = capture(model, {"x": x}, {"conv": (8, 3, 1, 0, 1)})
    fuse(graph.module)
    assert not any(found.pad != (0, 0, 0, 0) for found in map(convolution_of, graph.module.graph.nodes) if found)
