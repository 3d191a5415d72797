"""What would an engine of blocked systolic arrays take for graph networks? Trains them, runs them, compares modes.

python experiments/versagnn.py [record, experiments/records/hardware/versagnn.json]
python experiments/versagnn.py figure        docs/figures/hardware-versagnn.svg, from the record

GCN (Kipf & Welling 2017), GraphSAGE-mean (Hamilton et al. 2017) and GIN (Xu et al. 2019) on Cora and Citeseer, public
split, three seeds; each trained model's every product is stepped through the arrays. Features are rows of a bag of
words over their sum. The weights kept are those of the epoch with the least validation loss.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour import measure
from twofour.demo.data import data_folder
from twofour.drawing import drawn
from twofour.errors import HardwareError
from twofour.hardware import versagnn
from twofour.hardware.systolic import SystolicArray
from twofour.hardware.versagnn import Energy, Engine, GraphLayer, Sparse, Term

SEEDS, EPOCHS, RATE, DECAY, DROPOUT = (0, 1, 2), 200, 0.01, 5e-4, 0.5
HIDDEN = {"gcn": 16, "sage": 64, "gin": 64}
HEIGHTS = (32, 64)
ENGINES = {
    "7 x 32 x 32": Engine(),
    "8 columns a slot": Engine(ports=8),
    "1 x 64 x 64": Engine(SystolicArray(64, 64), 1),
}
DENSE = (1024, 1024, 1024)
RECORD = Path("experiments/records/hardware/versagnn.json")


class Data:
    """One citation graph."""

    def __init__(self, name: str) -> None:
        with np.load(data_folder() / "planetoid" / f"{name}.npz") as found:
            raw = dict(found)
        rows, columns = (int(size) for size in raw["x_shape"])
        starts = raw["x_indptr"].astype(np.int64)
        words = Sparse((rows, columns), starts, raw["x_indices"].astype(np.int64), raw["x_data"])
        total = np.maximum(words.degrees, 1)[words.rows].astype(np.float32)
        self.name, self.nodes, self.edges = name, rows, raw["edge_index"]
        self.features = Sparse(words.shape, words.starts, words.columns, words.values / total)
        self.labels = torch.from_numpy(raw["y"].astype(np.int64))
        self.train, self.validate, self.test = (torch.from_numpy(raw[f"{k}_mask"]) for k in ("train", "val", "test"))
        self.classes = int(raw["num_classes"])

    def graph(self, kind: str) -> Sparse:
        """The matrix that a network sums neighbours with."""
        build = {"gcn": versagnn.gcn_graph, "sage": versagnn.mean_graph, "gin": versagnn.gin_graph}[kind]
        return build(self.nodes, self.edges)


def as_torch(matrix: Sparse) -> Tensor:
    """The same matrix for torch."""
    values = torch.from_numpy(matrix.values.astype(np.float32))
    places = np.stack([matrix.rows, matrix.columns])
    return torch.sparse_coo_tensor(places, values, matrix.shape, check_invariants=True).coalesce()


class Net(nn.Module):
    """The three networks, weights first: graph x (features x weight)."""

    def __init__(self, kind: str, data: Data, hidden: int) -> None:
        super().__init__()
        self.kind, self.graph = kind, as_torch(data.graph(kind))
        widths = [data.features.shape[1], hidden, data.classes]
        sizes = {"gcn": widths, "sage": widths, "gin": [widths[0], hidden, hidden, hidden, data.classes]}[kind]
        self.weights = nn.ParameterList(nn.init.xavier_uniform_(torch.empty(a, b)) for a, b in pairwise(sizes))
        own = pairwise(sizes) if kind == "sage" else ()
        self.own = nn.ParameterList(nn.init.xavier_uniform_(torch.empty(a, b)) for a, b in own)
        self.biases = nn.ParameterList(torch.zeros(b) for b in sizes[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every node; x is sparse."""
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = self.dropped(x)
            total = x @ weight
            if self.kind != "gin" or index % 2 == 0:
                total = self.graph @ total
            if self.own:
                total = total + x @ self.own[index]
            x = total + bias
            x = F.relu(x) if index < len(self.weights) - 1 else x
        return x

    def dropped(self, x: Tensor) -> Tensor:
        """Dropout, also of a sparse matrix's values."""
        if not x.is_sparse:
            return F.dropout(x, DROPOUT, self.training)
        values = F.dropout(x.values(), DROPOUT, self.training)
        return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True, check_invariants=False)

    def layers(self, data: Data) -> tuple[GraphLayer, ...]:
        """The network as the engine takes it."""
        graph, last = data.graph(self.kind), len(self.weights) - 1
        found = []
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            terms = [Term(graph if self.kind != "gin" or index % 2 == 0 else None, weight.detach().numpy())]
            terms += [Term(None, self.own[index].detach().numpy())] if self.own else []
            found.append(GraphLayer(tuple(terms), bias.detach().numpy(), index < last))
        return tuple(found)


def trained(kind: str, data: Data, seed: int) -> Net:
    """Train one network and keep its best epoch."""
    torch.manual_seed(seed)
    net, x = Net(kind, data, HIDDEN[kind]), as_torch(data.features)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE, weight_decay=DECAY)
    best, kept = float("inf"), net.state_dict()
    for _ in range(EPOCHS):
        net.train()
        optimizer.zero_grad()
        F.cross_entropy(net(x)[data.train], data.labels[data.train]).backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            loss = float(F.cross_entropy(net(x)[data.validate], data.labels[data.validate]))
        if loss < best:
            best, kept = loss, {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.load_state_dict(kept)
    return net.eval()


def accuracy(output: np.ndarray, data: Data) -> float:
    """Percent of test nodes told rightly."""
    right = torch.from_numpy(output).argmax(1) == data.labels
    return 100 * float(right[data.test].double().mean())


def seeds(kind: str, data: Data) -> tuple[list[dict[str, float]], tuple[GraphLayer, ...]]:
    """Train with each seed, run on the engine, compare; the last network is returned."""
    rows, layers = [], ()
    for seed in SEEDS:
        net = trained(kind, data, seed)
        layers = net.layers(data)
        with torch.no_grad():
            torch_output = net(as_torch(data.features)).numpy()
        exact, ours = versagnn.reference(layers, data.features), versagnn.run(layers, data.features)
        rows.append(
            {
                "seed": seed,
                "accuracy": accuracy(ours.output, data),
                "torch_accuracy": accuracy(torch_output, data),
                "largest_error": float(np.abs(ours.output - exact).max()),
                "torch_error": float(np.abs(torch_output - exact).max()),
            }
        )
        print(data.name, kind, rows[-1], flush=True)
    return rows, layers


def compared(layers: tuple[GraphLayer, ...], data: Data) -> dict[str, Any]:
    """Work of one inference in each mode and engine, by kind of phase, and its energy."""
    table: dict[str, Any] = {}
    for name, engine in ENGINES.items():
        for mode in versagnn.MODES:
            for levels in (0, 1, 2) if (name, mode) == ("7 x 32 x 32", "sorted") else (0,):
                done = versagnn.run(layers, data.features, engine, mode=mode, levels=levels, stepped=False)
                kinds = {
                    kind: sum(p.work.cycles for p in done.phases if p.kind == kind)
                    for kind in ("transform", "aggregate")
                }
                table[f"{name}, {mode}, Strassen {levels}"] = {
                    **asdict(done.work),
                    **{f"{kind}_cycles": cycles for kind, cycles in kinds.items()},
                    "utilisation": engine.utilisation(done.work),
                    "microjoules": Energy().of(done.work) / 1e6,
                }
    return table


def packing(matrix: Sparse) -> dict[str, Any]:
    """Slots of a matrix at each height, the counts of the paper's reference."""
    found = {}
    for height in HEIGHTS:
        plain, natural = versagnn.strips(matrix, height), versagnn.condense(matrix, height)
        ordered, eight = (
            versagnn.condense(matrix, height, order="degree"),
            versagnn.condense(matrix, height, order="degree", ports=8),
        )
        found[str(height)] = {
            "dense": int(plain.dense.sum()),
            "tiles": int(plain.tiles.sum()),
            "occupied": int(plain.occupied.sum()),
            "bound": int(plain.bound.sum()),
            "condensed": natural.total,
            "fill": natural.fill,
            "sorted": ordered.total,
            "sorted_fill": ordered.fill,
            "sorted_merged_most": int(ordered.merged.max()),
            "sorted_merged_mean": float(ordered.merged.mean()),
            "sorted_8_columns": eight.total,
        }
    return found


def orders(data: Data, hidden: int) -> dict[str, int]:
    """Multiply-adds of a first GCN layer, weights first and neighbours first."""
    graph = data.graph("gcn")
    words = data.features.degrees[graph.columns].sum()
    both = np.count_nonzero(graph @ (data.features.dense() != 0).astype(np.float64))
    return {
        "A(XW)": int((len(data.features.columns) + len(graph.columns)) * hidden),
        "(AX)W": int(words + both * hidden),
    }


def dense() -> dict[str, Any]:
    """A dense product on the engine at each of Strassen's levels."""
    found = {}
    for levels in range(4):
        work = Engine().transform(*DENSE, levels)
        found[str(levels)] = {
            **asdict(work),
            "utilisation": Engine().utilisation(work),
            "microjoules": Energy().of(work) / 1e6,
        }
    return found


def draw(record: dict[str, Any], target: Path) -> None:
    """Cycles and energy of one inference in each mode, networks beside each other."""
    columns = [(data, kind) for data in record["data"] for kind in HIDDEN]
    with drawn(target, (10, 3.6), HardwareError, str(RECORD)) as figure:
        for axes, key, label in zip(
            figure.subplots(1, 2),
            ("cycles", "microjoules"),
            ("cycles, 7 arrays of 32 x 32", "energy, microjoules"),
            strict=True,
        ):
            for index, (data, kind) in enumerate(columns):
                modes = record["data"][data][kind]["modes"]
                values = [modes[f"7 x 32 x 32, {mode}, Strassen 0"][key] for mode in versagnn.MODES]
                place = np.arange(len(values)) + (index - len(columns) / 2 + 0.5) * 0.13
                axes.bar(place, values, 0.12, label=f"{data} {kind}", color=f"C{index}")
            axes.set_yscale("log")
            axes.set_xticks(range(len(versagnn.MODES)), versagnn.MODES)
            axes.set_ylabel(label)
        axes.legend(fontsize=7)


def main() -> None:
    """Train, run, compare, write the record; or draw it."""
    if sys.argv[1:] == ["figure"]:
        draw(json.loads(RECORD.read_text()), Path("docs/figures/hardware-versagnn.svg"))
        return
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORD
    record: dict[str, Any] = {"machine": measure.machine(), "energy": asdict(Energy()), "dense": dense(), "data": {}}
    for name in ("cora", "citeseer"):
        data = Data(name)
        entry: dict[str, Any] = {
            "A + I": packing(data.graph("gcn")),
            "X": packing(data.features),
            "orders": orders(data, 16),
        }
        for kind in HIDDEN:
            rows, layers = seeds(kind, data)
            entry[kind] = {"seeds": rows, "modes": compared(layers, data)}
        record["data"][name] = entry
    measure.write_json(target, record)


if __name__ == "__main__":
    main()
