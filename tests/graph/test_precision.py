"""Activations in bfloat16: where they are, what is left of conversions, and what answers stay float32."""

import pytest
import torch
from torch import Tensor, nn

from tests.graph.small import Encoder, GatedBlock, PreNormBlock
from tests.graph.test_rules import captured
from twofour.capture import Graph
from twofour.graph import arrange, lower_activations
from twofour.graph.base import aten
from twofour.kernels.attention import attention_of_columns
from twofour.kernels.norm import norm


def targets(graph: Graph) -> list[object]:
    return [node.target for node in graph.module.graph.nodes]


def dtypes(graph: Graph, *wanted: object) -> set[torch.dtype]:
    return {node.meta["val"].dtype for node in graph.module.graph.nodes if node.target in wanted}


def test_an_encoder_hands_bfloat16_on_without_conversions() -> None:
    graph, _ = captured(Encoder(layers=2), torch.randint(0, 50, (2, 19)), torch.ones(2, 19))
    assert lower_activations(graph.module) > 20
    assert all(node.meta["val"].dtype is torch.bfloat16 for node in graph.module.graph.nodes if "product" in node.meta)
    assert dtypes(graph, aten.to.dtype) == {torch.bool}, "the normalisations at both ends convert on their way"
    first, *_, last = [node for node in graph.module.graph.nodes if node.target is norm]
    assert first.args[-1] is torch.bfloat16 and last.args[-1] is torch.float32
    assert arrange(graph.module)["heads read in place"] == 2
    assert torch.narrow not in targets(graph) and aten.transpose.int not in targets(graph)
    assert dtypes(graph, attention_of_columns) == {torch.bfloat16}


def test_splits_are_views_and_heads_are_read_in_place() -> None:
    graph, counts = captured(PreNormBlock(), torch.randn(2, 21, 64))
    assert counts["splits into views"] == 1
    lower_activations(graph.module)
    assert arrange(graph.module)["heads read in place"] == 1
    (node,) = [node for node in graph.module.graph.nodes if node.target is attention_of_columns]
    assert node.args[0] is node.args[1] is node.args[2] and node.args[3:6] == ((0, 64, 128), (64, 64, 64), 16)


def test_a_gated_block_keeps_its_answer_float32() -> None:
    graph, _ = captured(GatedBlock(), torch.randn(2, 20, 64))
    lower_activations(graph.module)
    output = next(node for node in graph.module.graph.nodes if node.op == "output")
    assert all(node.meta["val"].dtype is torch.float32 for node in output.all_input_nodes)


def test_operators_that_are_not_known_keep_float32() -> None:
    class Softmax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.layer(x), -1) + 1.0

    graph, _ = captured(Softmax(), torch.randn(20, 16))
    assert lower_activations(graph.module) == 1
    assert dtypes(graph, aten.softmax.int) == {torch.float32}
    assert targets(graph).count(aten.to.dtype) == 2


def test_a_graph_that_changes_tensors_is_left_alone() -> None:
    graph, _ = captured(nn.Sequential(nn.Linear(16, 16), nn.Hardtanh()), torch.randn(20, 16))
    for node in graph.module.graph.nodes:  # capturing makes them plain; a rewrite may bring one back
        node.target = aten.hardtanh_.default if node.target is aten.hardtanh.default else node.target
    assert lower_activations(graph.module) == 0
    assert aten.to.dtype not in targets(graph)


class Masked(nn.Module):
    """The mask as Hugging Face's models build it: positions compared and indexed."""

    def __init__(self, least: int = 0, turned: bool = False) -> None:
        super().__init__()
        self.least, self.turned = least, turned

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length = mask.shape
        rows = torch.arange(batch)[:, None, None, None]
        queries, keys = torch.arange(length)[None, None, :, None], torch.arange(length)[None, None, None, :]
        if self.turned:
            rows, keys = torch.arange(batch)[None, None, None, :], torch.arange(length)[:, None, None, None]
        seen = queries.new_ones((), dtype=torch.bool) & (queries >= self.least) & mask.bool()[rows, keys]
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, seen)


@pytest.mark.parametrize(("least", "places"), [(0, 3), (1, 2)])
def test_masks_from_positions(least: int, places: int) -> None:
    from twofour.graph import Program

    model, x = Masked(least).eval(), torch.randn(2, 7, 16)
    mask = torch.rand(2, 7) > 0.4
    mask[:, 0] = True
    graph, counts = captured(model, x, mask.long())
    assert counts["masks from positions"] == places
    assert aten.index.Tensor not in targets(graph)
    torch.testing.assert_close(Program(graph.module)(x, mask.long())[0], model(x, mask.long()), atol=1e-5, rtol=1e-5)


def test_an_index_in_another_order_stays() -> None:
    graph, _ = captured(Masked(turned=True), torch.randn(7, 7, 16), torch.ones(7, 7).long())
    assert aten.index.Tensor in targets(graph)
