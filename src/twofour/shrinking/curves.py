"""Curves: what a group of channels loses at each width, and which channels go first.

With calibration data the loss is second-order (Optimal Brain Surgeon, Hassibi and Stork 1993; over whole columns as in
ZipLM, Kurtic et al. 2023): a weight W with inputs X of covariance H loses tr(W_B M^-1 W_B^T), M = (H^-1)_BB, when the
columns B go and the others make up for it by least squares. Without data a channel is worth the product of what makes
it and what reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calibration
from twofour.calibration import Statistics
from twofour.layers import PrunableWeight
from twofour.structure.shrink import Cuttable

DAMPING = 0.01
"""Share of the mean of the covariance's diagonal that is added to it (Frantar and Alistarh 2023, SparseGPT)."""

NOISE = 1e-6
"""Share of the mean square of inputs below which their variance is that of rounding in float32: sums of products that
are all alike differ by as much."""


@dataclass(frozen=True, eq=False)
class Curve:
    """What a group loses.

    Attributes:
        order: (size,) channels, those that go first in front.
        widths: Widths that it may have, descending; the first is its own.
        losses: Share of the consumers' output energy that is lost at each width, ascending from 0.
        source: "second-order" or "magnitude".
        rows: Fewest that the data showed of a reader's inputs, 0 where they showed none.
        inputs: That this reader has.
    """

    order: Tensor
    widths: tuple[int, ...]
    losses: tuple[float, ...]
    source: str
    rows: int = 0
    inputs: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the curve as JSON holds it."""
        return {**vars(self), "order": self.order.tolist()}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Curve:
        """Return the curve that `to_dict` gave."""
        order = torch.tensor(found["order"], dtype=torch.long, device="cpu")
        widths, losses, seen = tuple(found["widths"]), tuple(found["losses"]), (found["rows"], found["inputs"])
        return cls(order, widths, losses, found["source"], *seen)

    def kept(self, width: int) -> list[int]:
        """Return the channels that stay at a width, ascending."""
        return sorted(self.order[len(self.order) - width :].tolist())


def magnitude(
    group: Cuttable, tensors: Mapping[str, Tensor], readers: Mapping[str, PrunableWeight], widths: tuple[int, ...]
) -> Curve:
    """Return the curve of a group by the squares of what makes each channel times those of what reads it."""
    made, read = (torch.zeros(group.size, dtype=torch.float64, device="cpu") for _ in range(2))
    for place in group.group.places:
        tensor = tensors.get(place.name)
        if tensor is None or tensor.ndim < 2:
            continue
        lines = tensor.detach().movedim(place.axis, 0).flatten(1).square().sum(1, dtype=torch.float64).cpu()
        here = place.index >= 0
        reads = place.name in readers and place.axis == readers[place.name].axis.axis
        (read if reads else made).index_add_(0, place.index[here], lines[here])
    score = torch.where(made > 0, made, made.eq(0).all()) * torch.where(read > 0, read, read.eq(0).all())
    order = score.argsort(stable=True)
    lost = score[order].cumsum(0) / score.sum().clamp_min(torch.finfo(torch.float64).tiny)
    return Curve(order, widths, (0.0, *(float(lost[group.size - width - 1]) for width in widths[1:])), "magnitude")


def columns_of(group: Cuttable, weight: PrunableWeight) -> Tensor | None:
    """Return (size, columns) where each channel stands in the matrix of a weight that reads it, or None.

    The matrix is `calibration.matrix`'s: kernel positions one after the other, all inputs in each.
    """
    places = [p for p in group.group.places if p.name in weight.names and p.axis == weight.axis.axis]
    if len(places) != 1 or len(weight.feeds) != 1 or getattr(weight.module, "groups", 1) != 1:
        return None
    index = places[0].index
    here = (index >= 0).nonzero().flatten()
    if len(here) % group.size:
        return None
    lines = here[index[here].argsort(stable=True)].view(group.size, -1)
    columns = positions(weight).argsort(stable=True).view(len(index), -1)  # (positions, taps)
    return columns[lines].transpose(1, 2).flatten(1)


def positions(weight: PrunableWeight) -> Tensor:
    """Return (columns,) which position of a weight's reduction axis each column of its matrix is.

    The matrix is `calibration.matrix`'s, of a weight without groups: taps one after the other, all positions in each.
    """
    width = calibration.matrix(weight, weight.parameter.detach()).shape[-1]
    return torch.arange(width, device="cpu") % weight.parameter.shape[weight.axis.axis]


def bias_of(weight: PrunableWeight) -> nn.Parameter | None:
    """Return the bias that is added to the products of a weight: of a recurrent layer's inputs or states its own.

    A GRU multiplies `bias_hh` by its gate together with the products of the states, and adds `bias_ih` to those of the
    inputs (torch.nn.GRU), so that each takes up the mean of what its weight reads.
    """
    return weight.module._parameters.get(weight.attribute.replace("weight", "bias"))


def shown(statistics: Statistics) -> bool:
    """Whether the inputs of a weight differ from row to row, by more than rounding does."""
    if not statistics.rows or statistics.squares is None or statistics.sums is None:
        return False
    squares = statistics.squares[0].cpu() / statistics.rows
    mean = statistics.sums[0].cpu() / statistics.rows
    return float((squares - mean.square()).sum()) > NOISE * float(squares.sum())


def covariance(weight: PrunableWeight, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """Return the mean product of the inputs of a weight, (in, in) float64 on the CPU, and their mean (in,).

    Where the layer has a bias, which takes up the mean, products are of what is around it, and damped in any case, by
    no less than rounding makes of products that are all alike.
    """
    assert statistics.hessian is not None and statistics.sums is not None
    moments = statistics.hessian[0].to("cpu", torch.float64) / statistics.rows
    mean = statistics.sums[0].cpu() / statistics.rows
    least = (NOISE * moments.diagonal().mean()).clamp_min(1e-14)
    if bias_of(weight) is not None:
        moments = moments - torch.outer(mean, mean)
    damping = DAMPING * moments.diagonal().mean().clamp_min(0) + least
    return moments + damping * torch.eye(len(mean), dtype=torch.float64, device="cpu"), mean


@dataclass(eq=False)
class Reader:
    """A weight that reads a group's channels, while channels are taken from it.

    Attributes:
        weight: (out, in) float64, made up for what went.
        inverse: Of the covariance of what is left, (in, in).
        columns: (size, columns) where each channel stands.
        energy: Of its outputs.
        rows: How many of its inputs were seen.
    """

    weight: Tensor
    inverse: Tensor
    columns: Tensor
    energy: float
    rows: int = 0

    @classmethod
    def of(cls, weight: PrunableWeight, columns: Tensor, moments: Tensor, rows: int = 0) -> Reader:
        """Return the reader of a weight whose inputs have these moments."""
        values = calibration.matrix(weight, weight.parameter.detach())[0].to("cpu", torch.float64)
        energy = max(float(((values @ moments) * values).sum()), 1e-300)
        return cls(values, torch.linalg.inv(moments), columns, energy, rows)

    def losses(self, alive: Tensor) -> Tensor:
        """Return what each of some channels would lose, as a share of the energy."""
        columns = self.columns[alive]
        blocks = self.inverse[columns.unsqueeze(2), columns.unsqueeze(1)]
        values = self.weight[:, columns].permute(1, 2, 0)
        return (values * torch.linalg.solve(blocks, values)).sum((1, 2)) / self.energy

    def remove(self, channels: Tensor) -> float:
        """Take channels away and let the others make up for them; return the share of the energy that is lost."""
        columns = self.columns[channels].flatten()
        beside = self.inverse[:, columns]
        solved = torch.linalg.solve(beside[columns], torch.cat([self.weight[:, columns].T, beside.T], dim=1))
        out = len(self.weight)
        lost = float((self.weight[:, columns].T * solved[:, :out]).sum())
        self.weight = self.weight - (beside @ solved[:, :out]).T
        self.inverse = self.inverse - beside @ solved[:, out:]
        self.weight[:, columns] = 0
        return max(lost, 0.0) / self.energy


def second_order(group: Cuttable, readers: Sequence[Reader], widths: tuple[int, ...]) -> Curve:
    """Return the curve of a group by what its readers lose, channels taken from one width to the next."""
    alive = torch.arange(group.size, device="cpu")
    order: list[Tensor] = []
    losses = [0.0]
    for width in widths[1:]:
        scores = torch.stack([reader.losses(alive) for reader in readers]).sum(0)
        chosen = scores.argsort(stable=True)[: len(alive) - width]
        gone = alive[chosen]
        losses.append(losses[-1] + sum(reader.remove(gone) for reader in readers))
        order.append(gone)
        alive = alive[torch.isin(alive, gone, invert=True)]
    fewest = min(readers, key=lambda reader: reader.rows / reader.weight.shape[1])
    said = {"rows": fewest.rows, "inputs": fewest.weight.shape[1]}
    return Curve(torch.cat([*order, alive]), widths, tuple(losses), "second-order", **said)
