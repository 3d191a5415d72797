"""Networks: trained graph networks as sums of (graph matrix) x (features x weight), by reference and on an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import HardwareError
from twofour.hardware.systolic.stepped import step
from twofour.hardware.versagnn.engine import Engine
from twofour.hardware.versagnn.sparse import Sparse
from twofour.hardware.versagnn.stepped import step_slots
from twofour.hardware.versagnn.strassen import strassen
from twofour.hardware.versagnn.work import Work

Matrix = NDArray[Any]


@dataclass(frozen=True)
class Term:
    """One sum over neighbours: graph x (features x weight), or features x weight where the graph is None."""

    graph: Sparse | None
    weight: Matrix


@dataclass(frozen=True)
class GraphLayer:
    """One layer: the sum of its terms, a bias, and relu where it is not the last.

    Attributes:
        terms: What is added up.
        bias: (width,).
        relu: Whether negative values become zero.
    """

    terms: tuple[Term, ...]
    bias: Matrix
    relu: bool


@dataclass(frozen=True)
class Phase:
    """What one product of a layer took: "transform" is features x weight, "aggregate" graph x features."""

    layer: int
    kind: str
    sparse: bool
    work: Work


@dataclass(frozen=True)
class Inference:
    """What an engine computed, and what every phase of it took."""

    output: Matrix
    phases: tuple[Phase, ...]

    @property
    def work(self) -> Work:
        """All phases, one after the other."""
        return sum((phase.work for phase in self.phases), Work())


def neighbours(nodes: int, edges: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges (2, edges) of an undirected graph both ways, without loops, each once.

    Raises:
        HardwareError: An edge leads outside of the nodes.
    """
    source, target = np.asarray(edges, np.int64)
    if len(source) and (min(source.min(), target.min()) < 0 or max(source.max(), target.max()) >= nodes):
        raise HardwareError(
            "an edge leads nowhere",
            got=f"{nodes} nodes",
            wanted="edges between them",
            remedy="count nodes from 0, and give the number of all of them",
        )
    other = source != target
    source, target = np.concatenate([source[other], target[other]]), np.concatenate([target[other], source[other]])
    place = np.unique(source * nodes + target)
    return place // nodes, place % nodes


def gcn_graph(nodes: int, edges: NDArray[Any]) -> Sparse:
    """Return D^-1/2 (A + I) D^-1/2 (Kipf & Welling 2017)."""
    rows, columns = neighbours(nodes, edges)
    loops = np.arange(nodes)
    rows, columns = np.concatenate([rows, loops]), np.concatenate([columns, loops])
    scale = np.bincount(rows, minlength=nodes) ** -0.5
    return Sparse.of((nodes, nodes), rows, columns, scale[rows] * scale[columns])


def mean_graph(nodes: int, edges: NDArray[Any]) -> Sparse:
    """Return D^-1 A: the mean over neighbours is a linear sum (GraphSAGE, Hamilton et al. 2017); none give zero."""
    rows, columns = neighbours(nodes, edges)
    degree = np.bincount(rows, minlength=nodes)
    return Sparse.of((nodes, nodes), rows, columns, 1 / degree[rows])


def gin_graph(nodes: int, edges: NDArray[Any], epsilon: float = 0.0) -> Sparse:
    """Return A + (1 + epsilon) I (Xu et al. 2019)."""
    rows, columns = neighbours(nodes, edges)
    loops = np.arange(nodes)
    values = np.concatenate([np.ones(len(rows)), np.full(nodes, 1 + epsilon)])
    return Sparse.of((nodes, nodes), np.concatenate([rows, loops]), np.concatenate([columns, loops]), values)


def reference(layers: Sequence[GraphLayer], features: Sparse) -> Matrix:
    """Run the network in float64 with plain products, graph x features first as the papers write it.

    Args:
        layers: The network.
        features: Input features, (nodes, width).
    """
    hidden = features.dense().astype(np.float64)
    for layer in layers:
        total = sum(
            (hidden if term.graph is None else term.graph @ hidden) @ term.weight.astype(np.float64)
            for term in layer.terms
        )
        hidden = total + layer.bias
        hidden = np.maximum(hidden, 0) if layer.relu else hidden
    return hidden


def run(
    layers: Sequence[GraphLayer],
    features: Sparse,
    engine: Engine | None = None,
    *,
    mode: str = "sorted",
    levels: int = 0,
    stepped: bool = True,
) -> Inference:
    """Run the network on an engine in float32: weights first, A (X W), so that neighbours are summed in few columns.

    Args:
        layers: The network.
        features: Input features, taken as a sparse operand in the first layer.
        engine: The arrays; seven of 32 x 32 by default.
        mode: How sparse operands enter, one of `MODES`.
        levels: Strassen's levels of dense products.
        stepped: Whether every product is computed by stepping an array: slots, or in modes "plain" and "tiles" all
            tiles, the empty ones among them; False computes it by numpy. The work is the same.

    Raises:
        HardwareError: The mode is unknown, or sizes do not fit.
    """
    machine = _Machine(engine or Engine(), mode, levels, stepped)
    hidden: Matrix | Sparse = features
    for index, layer in enumerate(layers):
        machine.layer = index
        total: Matrix | None = None
        for term in layer.terms:
            part = machine.transform(hidden, term.weight.astype(np.float32))
            part = part if term.graph is None else machine.multiply("aggregate", term.graph, part)
            total = part if total is None else total + part
        assert total is not None
        hidden = total + layer.bias.astype(np.float32)
        hidden = np.maximum(hidden, 0) if layer.relu else hidden
    assert not isinstance(hidden, Sparse)
    return Inference(hidden, tuple(machine.phases))


class _Machine:
    def __init__(self, engine: Engine, mode: str, levels: int, stepped: bool) -> None:
        self.engine, self.mode, self.levels, self.stepped = engine, mode, levels, stepped
        self.layer = 0
        self.phases: list[Phase] = []

    def transform(self, features: Matrix | Sparse, weight: Matrix) -> Matrix:
        if isinstance(features, Sparse):
            return self.multiply("transform", features, weight)
        work = self.engine.transform(features.shape[0], weight.shape[1], features.shape[1], self.levels)
        self.phases.append(Phase(self.layer, "transform", False, work))
        if not self.stepped:
            return features @ weight
        return strassen(features, weight, self.levels, lambda x, w: step(self.engine.array, x, w).output)

    def multiply(self, kind: str, matrix: Sparse, right: Matrix) -> Matrix:
        work = self.engine.aggregate(matrix, right.shape[1], self.mode)
        self.phases.append(Phase(self.layer, kind, True, work))
        if not self.stepped:
            return (matrix @ right).astype(np.float32)
        if self.mode in ("plain", "tiles"):
            return step(self.engine.array, matrix.dense().astype(np.float32), right).output
        packed = self.engine.condense(matrix, self.mode)
        return step_slots(self.engine.array, packed, right).output.astype(np.float32)
