"""The 25 cells of table 3, and what the operators' table says of real calls."""

from __future__ import annotations

import torch
from torch import nn

from tests.turns import in_turn
from twofour.capture import arguments, capture
from twofour.graph import operators
from twofour.graph.mapping import COMBINATIONS, Fusion, MappingType, combine, most_complex

ONE, MANY, MANY_TO_MANY = MappingType.ONE_TO_ONE, MappingType.ONE_TO_MANY, MappingType.MANY_TO_MANY
REORGANIZE, SHUFFLE = MappingType.REORGANIZE, MappingType.SHUFFLE
GREEN, YELLOW, RED = Fusion.ALWAYS, Fusion.MEASURE, Fusion.NEVER

CELLS = [
    (ONE, ONE, GREEN, ONE), (ONE, MANY, GREEN, MANY), (ONE, MANY_TO_MANY, GREEN, MANY_TO_MANY),
    (ONE, REORGANIZE, GREEN, REORGANIZE), (ONE, SHUFFLE, GREEN, SHUFFLE),
    (MANY, ONE, GREEN, MANY), (MANY, MANY, YELLOW, MANY), (MANY, MANY_TO_MANY, RED, None),
    (MANY, REORGANIZE, YELLOW, MANY), (MANY, SHUFFLE, YELLOW, MANY),
    (MANY_TO_MANY, ONE, GREEN, MANY_TO_MANY), (MANY_TO_MANY, MANY, YELLOW, MANY_TO_MANY),
    (MANY_TO_MANY, MANY_TO_MANY, RED, None), (MANY_TO_MANY, REORGANIZE, YELLOW, MANY_TO_MANY),
    (MANY_TO_MANY, SHUFFLE, YELLOW, MANY_TO_MANY),
    (REORGANIZE, ONE, GREEN, REORGANIZE), (REORGANIZE, MANY, YELLOW, MANY),
    (REORGANIZE, MANY_TO_MANY, YELLOW, MANY_TO_MANY), (REORGANIZE, REORGANIZE, GREEN, REORGANIZE),
    (REORGANIZE, SHUFFLE, GREEN, REORGANIZE),
    (SHUFFLE, ONE, GREEN, SHUFFLE), (SHUFFLE, MANY, YELLOW, MANY), (SHUFFLE, MANY_TO_MANY, YELLOW, MANY_TO_MANY),
    (SHUFFLE, REORGANIZE, GREEN, REORGANIZE), (SHUFFLE, SHUFFLE, GREEN, SHUFFLE),
]  # fmt: skip
"""Table 3 of arXiv 2108.13342, cell by cell."""


@in_turn(("first", "second", "fusion", "made"), CELLS)
def test_a_cell_of_table_3(first: MappingType, second: MappingType, fusion: Fusion, made: MappingType | None) -> None:
    cell = combine(first, second)
    assert (cell.fusion, cell.mapping) == (fusion, made)


def test_the_table_has_each_pair_once() -> None:
    assert len(CELLS) == len(COMBINATIONS) == 25
    assert sum(cell.fusion is not RED for cell in COMBINATIONS.values()) == 23  # the paper's code generation rules
    assert most_complex([ONE, SHUFFLE, MANY]) is MANY and most_complex([]) is ONE


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.conv = nn.Linear(16, 32), nn.LayerNorm(32), nn.Conv1d(6, 4, 3)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        y = y * self.scale + torch.exp(y)
        y = torch.softmax(y.transpose(1, 2).reshape(2, 32, 6).expand(2, 32, 6), -1)
        y = torch.nn.functional.scaled_dot_product_attention(y, y, y)
        return self.conv(y.transpose(1, 2)).sum(-1) + y.view(2, -1).cumsum(1)[:, :4]


def rows() -> dict[str, torch.fx.Node]:
    model = Calls().eval()
    graph = capture(model, arguments(model, (torch.randn(2, 6, 16),), {})).module.graph
    return {str(node.target).split(".")[1]: node for node in graph.nodes if node.op == "call_function"}


def test_calls_of_a_graph_have_type_flops_and_bytes() -> None:
    nodes = rows()
    types = {name: operators.mapping_of(node) for name, node in nodes.items()}
    assert types == {
        "linear": MANY_TO_MANY, "layer_norm": MANY_TO_MANY, "mul": MANY, "exp": ONE, "add": ONE, "transpose": SHUFFLE,
        "reshape": REORGANIZE, "expand": MANY, "softmax": MANY_TO_MANY, "scaled_dot_product_attention": MANY_TO_MANY,
        "conv1d": MANY_TO_MANY, "sum": MANY_TO_MANY, "view": REORGANIZE, "cumsum": MANY_TO_MANY, "slice": ONE,
    }  # fmt: skip
    flops = {name: operators.flops(node) for name, node in nodes.items()}
    assert flops["linear"] == 2 * 6 * 32 * (2 * 16 + 1)
    assert flops["conv1d"] == 2 * 4 * 30 * (2 * 6 * 3 + 1)
    assert flops["scaled_dot_product_attention"] == 2 * 32 * 32 * (2 * 6 + 4 + 2 * 6)
    assert flops["mul"] == flops["exp"] == 2 * 6 * 32 and flops["softmax"] == 4 * 2 * 32 * 6 and flops["view"] == 0
    traffic = {name: operators.traffic(node) for name, node in nodes.items()}
    assert traffic["exp"] == 2 * 4 * 2 * 6 * 32 and traffic["transpose"] == traffic["view"] == traffic["slice"] == 0
    assert traffic["linear"] == 4 * (2 * 6 * 16 + 16 * 32 + 32 + 2 * 6 * 32)


def test_an_operator_without_a_row_is_known_as_such() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    odd = graph.call_function(torch.ops.aten.linalg_inv.default, (x,))
    assert operators.find(odd) is None and operators.mapping_of(odd) is None and operators.flops(odd) == 0
    assert operators.find(graph.call_function(torch.ops.aten.add_.Tensor, (x, x))) is operators.OPERATORS["add"]


@in_turn("name", sorted(operators.OPERATORS))
def test_every_row_names_an_operator_of_torch(name: str) -> None:
    assert hasattr(torch.ops.aten, name) or name in operators.BUILTINS.values()
