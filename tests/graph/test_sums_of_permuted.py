"""A residual sum with a permuted product is added by the product, the operand read in its order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.turns import in_turn
from twofour.capture import Graph, capture
from twofour.graph import Program, fuse, rewrite, simplify
from twofour.graph.base import aten, product_of
from twofour.graph.rules.mark_products import MARK_PRODUCTS
from twofour.graph.rules.sums_of_permuted import SUMS_OF_PERMUTED


class Scaled(nn.Module):
    """The end of a ConvNeXt block: channels last, a layer, its scale, channels first again, the sum."""

    def __init__(self, *, product_first: bool = True, shown: bool = False) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 16), nn.Parameter(torch.randn(16))
        self.product_first, self.shown = product_first, shown

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = (self.scale * self.layer(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        total = y + x if self.product_first else x + y
        return (total.permute(0, 2, 3, 1), y) if self.shown else (total.permute(0, 2, 3, 1),)


def fused(model: nn.Module, x: Tensor) -> tuple[Graph, dict[str, int]]:
    graph = capture(model.eval(), {"x": x})
    counts = simplify(graph.module)
    counts |= rewrite(graph.module).counts
    return graph, counts | fuse(graph.module)


@pytest.mark.parametrize("product_first", [False, True])
def test_scale_permutation_and_sum_are_one_product(product_first: bool) -> None:
    graph, counts = fused(Scaled(product_first=product_first), torch.randn(2, 16, 3, 5))
    assert counts["vector into a weight"] == counts["sums in a product's order"] == 1
    assert counts["sums and gates into products"] == 1
    nodes = [node for node in graph.module.graph.nodes if node.op == "call_function"]
    assert [node.target for node in nodes if node.target is not aten.permute.default] == [nodes[-1].target]
    found = product_of(nodes[-1])
    assert found is not None and found.epilogue.combine == "add"


@in_turn("strange", [torch.nan, torch.inf, -torch.inf, 0.0, 1e-40])
@in_turn("size", [(2, 16, 3, 5), (1, 16, 1, 7), (3, 16, 4, 4)])
def test_the_answers_stay(strange: float, size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Scaled()
    x = torch.randn(2, 16, 3, 5)
    graph = capture(model.eval(), {"x": x})
    simplify(graph.module)
    assert rewrite(graph.module).counts["vector into a weight"] == 1
    MARK_PRODUCTS.rewrite(graph.module)
    assert SUMS_OF_PERMUTED.rewrite(graph.module) == 1
    x = torch.randn(size)
    x[0, 3, 0, 1] = strange
    found = computed(graph, x)
    want = model.double()(x.double())[0]
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


def computed(graph: Graph, x: Tensor) -> Tensor:
    """Run the graph with its products as torch's linear layers."""
    module = graph.module
    for node in [node for node in module.graph.nodes if product_of(node)]:
        found = product_of(node)
        assert found is not None
        source = found.sources[0]
        with module.graph.inserting_before(node):
            weight, bias = (module.graph.get_attr(name.replace(".", "__")) for name in (source.weight, source.bias))
            new = module.graph.call_function(aten.linear.default, (node.args[0], weight, bias))
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
    return Program(module)(x)[0]


def test_a_product_that_others_read_stays_before_the_permutation() -> None:
    _, counts = fused(Scaled(shown=True), torch.randn(2, 16, 3, 5))
    assert counts["sums in a product's order"] == 0
