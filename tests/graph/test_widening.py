"""A bfloat16 model's graph: rewritten as one of float32, bfloat16 between what that made, and its answers bfloat16."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.small import Encoder
from twofour.capture import KEPT, Graph, capture
from twofour.graph import arrange, fuse, lower_activations, simplify, widen_activations
from twofour.graph.base import aten
from twofour.kernels.attention import attention, attention_of_columns
from twofour.kernels.norm import norm, norm_in_place


def widened(model: nn.Module, **inputs: Tensor) -> tuple[Graph, int]:
    """The graph of a model in bfloat16, its Linears kept, as wide as it gets."""
    model = model.eval().bfloat16()
    kept = {name: (layer.out_features,) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    graph = capture(model, inputs, kept)
    return graph, widen_activations(graph.module, kept)


def dtypes(graph: Graph, *targets: Any) -> set[torch.dtype]:
    return {node.meta["val"].dtype for node in graph.module.graph.nodes if node.target in targets}


def answers(graph: Graph) -> set[torch.dtype]:
    output = next(node for node in graph.module.graph.nodes if node.op == "output")
    return {node.meta["val"].dtype for node in output.all_input_nodes}


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_is_as_fused_as_in_float32(layers: int) -> None:
    graph, count = widened(Encoder(layers=layers), ids=torch.randint(0, 50, (2, 9)), mask=torch.ones(2, 9))
    assert count > 5 and dtypes(graph, KEPT) == {torch.float32} and answers(graph) == {torch.bfloat16}
    simplify(graph.module)
    fused = fuse(graph.module)
    assert fused["attention fused"] == layers and fused["normalisations fused"] == 2 * layers + 1
    assert lower_activations(graph.module)
    assert dtypes(graph, attention) == {torch.bfloat16} and answers(graph) == {torch.bfloat16}
    assert all(node.meta["val"].dtype is torch.bfloat16 for node in graph.module.graph.nodes if "product" in node.meta)
    assert dtypes(graph, norm, norm_in_place) == {torch.bfloat16}
    arrange(graph.module)
    assert dtypes(graph, attention_of_columns) <= {torch.bfloat16}
    casts = [node for node in graph.module.graph.nodes if node.target is aten.to.dtype]
    reals = [node for node in casts if node.args[0].meta["val"].dtype is node.meta["val"].dtype]
    assert not reals, "conversions to the type that is there"


def test_operators_that_are_not_known_keep_bfloat16() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sort(self.layer(x))[0] * 2.0

    graph, _ = widened(Sorted(), x=torch.randn(2, 16).bfloat16())
    (node,) = [node for node in graph.module.graph.nodes if "sort" in str(node.target)]
    assert node.args[0].meta["val"].dtype is torch.bfloat16 and node.args[0].target is aten.to.dtype
    assert answers(graph) == {torch.bfloat16}


def test_a_float32_model_with_a_rounding_of_its_own_keeps_it() -> None:
    class Rounding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).bfloat16().float()

    graph = capture(Rounding(), {"x": torch.randn(2, 16)}, {"layer": (16,)})
    assert widen_activations(graph.module, ["layer"]) == 0
