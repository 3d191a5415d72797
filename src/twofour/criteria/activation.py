"""Wanda and RIA: magnitudes weighed by the norm of the input that each weight is multiplied with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.calibration import Need, Statistics
from twofour.criteria.base import Scored


class _ByNorms(Scored):
    """What ranks by the weight and the norms of its inputs has in common."""

    @property
    def need(self) -> Need | None:
        """The norm of each input."""
        return "norms"

    @property
    def absolute(self) -> bool:
        """False: inputs that are always zero have negative scores."""
        return False


@dataclass(frozen=True)
class Wanda(_ByNorms):
    """Rank by |W_ij| ||X_j||_2 (Sun, Liu, Bair, Kolter 2023, "A Simple and Effective Pruning Approach", eq. 1)."""

    @property
    def kind(self) -> str:
        """The criterion's name: "wanda"."""
        return "wanda"

    def score(self, weight: Tensor, statistics: Statistics | None = None, name: str = "") -> Tensor:
        """Return float32 scores; inputs that never were other than zero come last, by magnitude."""
        norms = _norms(statistics)
        size = _real(weight).abs()
        return live_first(size * norms.to(size.dtype), size, norms > 0)


@dataclass(frozen=True)
class RIA(_ByNorms):
    """Rank by relative importance and activations (Zhang et al. 2024, "Plug-and-Play", eqs. 2 and 4).

    (|W_ij| / sum over the row i + |W_ij| / sum over the column j) * ||X_j||_2^power.

    Attributes:
        power: The paper's a, 0.5.
    """

    power: float = 0.5

    @property
    def kind(self) -> str:
        """The criterion's name: "ria"."""
        return "ria"

    def score(self, weight: Tensor, statistics: Statistics | None = None, name: str = "") -> Tensor:
        """Return float32 scores; inputs that never were other than zero come last, by magnitude."""
        norms = _norms(statistics)
        size = _real(weight).abs()
        tiny = torch.finfo(size.dtype).tiny
        relative = size / size.sum(-1, keepdim=True).clamp_min(tiny) + size / size.sum(-2, keepdim=True).clamp_min(tiny)
        return live_first(relative * norms.pow(self.power).to(size.dtype), size, norms > 0)


def live_first(scores: Tensor, size: Tensor, live: Tensor) -> Tensor:
    """Return non-negative `scores`; those of inputs that are not `live` become negative, in the order of `size`."""
    return torch.where(live, scores, -1 / (1 + size))


def _norms(statistics: Statistics | None) -> Tensor:
    assert statistics is not None, "asked for by `need`"
    # Divided by the root of the rows, so that long data do not leave the range of float32.
    return (statistics.norms / max(statistics.rows, 1) ** 0.5).unsqueeze(1)


def _real(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
