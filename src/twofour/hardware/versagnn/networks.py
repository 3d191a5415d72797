"""Networks: trained graph networks as sums of (graph matrix) x (features x weight), by reference and on an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import HardwareError
from twofour.hardware.sizes import require_integers
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


def neighbours(nodes: int, edges: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges (2, edges) of an undirected graph both ways, without loops, each once.

    Raises:
        HardwareError: There is no node, the edges are not pairs of whole numbers, or one leads outside of the nodes.
    """
    (nodes,) = require_integers(
        "a graph cannot have so many nodes", "count every node, also those without", nodes=nodes
    )
    source, target = _pairs(edges)
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


def _pairs(edges: Any) -> NDArray[np.int64]:
    """Return edges as int64 (2, edges)."""
    try:
        found = np.asarray(edges)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_edges(f"{type(error).__name__}: {error}") from error
    if found.ndim != 2 or len(found) != 2:
        raise _no_edges(f"shape {found.shape}")
    if found.dtype.kind not in "iuf" or not (np.isfinite(found) & (found == np.floor(found))).all():
        raise _no_edges(f"{found.dtype} that are not all whole numbers")
    return found.astype(np.int64)


def _no_edges(got: str) -> HardwareError:
    return HardwareError(
        "the edges of the graph cannot be read",
        got=got,
        wanted="whole numbers (2, edges): the first node of each edge, then the second",
        remedy="edges.T, if there is a row for each edge",
    )


def gcn_graph(nodes: int, edges: Any) -> Sparse:
    """Return D^-1/2 (A + I) D^-1/2 (Kipf & Welling 2017).

    Raises:
        HardwareError: As `neighbours`.
    """
    rows, columns = neighbours(nodes, edges)
    loops = np.arange(nodes)
    rows, columns = np.concatenate([rows, loops]), np.concatenate([columns, loops])
    scale = np.bincount(rows, minlength=nodes) ** -0.5
    return Sparse.of((nodes, nodes), rows, columns, scale[rows] * scale[columns])


def mean_graph(nodes: int, edges: Any) -> Sparse:
    """Return D^-1 A: the mean over neighbours is a linear sum (GraphSAGE, Hamilton et al. 2017); none give zero.

    Raises:
        HardwareError: As `neighbours`.
    """
    rows, columns = neighbours(nodes, edges)
    degree = np.bincount(rows, minlength=nodes)
    return Sparse.of((nodes, nodes), rows, columns, 1 / degree[rows])


def gin_graph(nodes: int, edges: Any, epsilon: float = 0.0) -> Sparse:
    """Return A + (1 + epsilon) I (Xu et al. 2019).

    Raises:
        HardwareError: As `neighbours`.
    """
    rows, columns = neighbours(nodes, edges)
    loops = np.arange(nodes)
    values = np.concatenate([np.ones(len(rows)), np.full(nodes, 1 + epsilon)])
    return Sparse.of((nodes, nodes), np.concatenate([rows, loops]), np.concatenate([columns, loops]), values)


def reference(layers: Sequence[GraphLayer], features: Sparse) -> Matrix:
    """Run the network in float64 with plain products, graph x features first as the papers write it.

    Args:
        layers: The network.
        features: Input features, (nodes, width).

    Raises:
        HardwareError: The features are not a `Sparse`, or sizes do not fit.
    """
    _require(layers, features)
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
        HardwareError: The mode is unknown, the levels are too many, the features are not a `Sparse`, or sizes do not
            fit.
    """
    _require(layers, features)
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


def _require(layers: Sequence[GraphLayer], features: Sparse) -> None:
    if not isinstance(features, Sparse):
        raise HardwareError(
            "the features are not a sparse matrix",
            got=f"{type(features).__name__}{getattr(features, 'shape', '')}",
            wanted="a versagnn.Sparse: the first layer takes them as a sparse operand",
            remedy="versagnn.Sparse.of(x.shape, *x.nonzero(), x[x.nonzero()]) of a dense array x",
        )
    if not layers:
        raise HardwareError("the network has no layers", got="0", wanted="1 or more", remedy="GraphLayer(terms, ...)")
    shape: tuple[int, ...] = features.shape
    for index, layer in enumerate(layers):
        shape = _output(index, layer, shape)


def _output(index: int, layer: GraphLayer, given: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a layer's output from that of its input."""
    shapes: set[tuple[int, ...]] = set()
    for term in layer.terms:
        weight, graph = np.shape(term.weight), term.graph.shape if term.graph is not None else (given[0], given[0])
        if not isinstance(term.weight, np.ndarray) or len(weight) != 2 or weight[0] != given[1]:
            kind = type(term.weight).__name__
            raise _misfit(index, f"an input {given}, a weight {weight}, {kind}", "numpy arrays (width, outputs)")
        if graph[1] != given[0]:
            raise _misfit(index, f"an input of {given[0]} rows, a graph {graph}", "a row of features for each node")
        shapes.add((graph[0], weight[1]))
    bias = np.shape(layer.bias)
    if len(shapes) != 1 or not isinstance(layer.bias, np.ndarray) or bias not in ((next(iter(shapes))[1],), (1,), ()):
        got = f"terms that make {sorted(shapes)}, a bias {bias}, {type(layer.bias).__name__}"
        raise _misfit(index, got, "terms of one size, and a numpy array (outputs,)")
    return next(iter(shapes))


def _misfit(index: int, got: str, wanted: str) -> HardwareError:
    return HardwareError(
        f"layer {index} of the network does not fit", got=got, wanted=wanted, remedy="the sizes must follow each other"
    )


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
