"""N:M: at most N non-zero values in every M consecutive ones along the reduction axis.

2:4 is the pattern of Sparse Tensor Cores (Mishra et al. 2021, section 3); 1:2 is its form for tf32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.native import gpu
from twofour.patterns.base import Conformity, Pattern, non_finite, require_groups
from twofour.patterns.groups import check_groups, project_reference, require_possible
from twofour.shapes import Bool, Real, Shaped

HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
"""What the masks on the GPU read."""


@dataclass(frozen=True)
class NM(Pattern):
    """At most `n` non-zero values in every group of `m` consecutive ones (1 <= n < m <= 64, PatternError else)."""

    n: int
    m: int

    def __post_init__(self) -> None:
        require_possible(self.name, self.n, self.m, unit=1)

    @property
    def name(self) -> str:
        """The pattern's text, for example "2:4"."""
        return f"{self.n}:{self.m}"

    @property
    def group(self) -> int:
        """Values per group: m."""
        return self.m

    @property
    def density(self) -> float:
        """Largest fraction of non-zero values: n / m."""
        return self.n / self.m

    def within(self, other: Pattern) -> bool:
        """Tell whether this N:M implies another; see `Pattern.within`.

        A group of m lies in whole groups of `other` (k = other.m / m of them hold k n values at most), or is cut into
        whole groups of it, each of which may hold all n.
        """
        if not isinstance(other, NM):
            return super().within(other)
        if other.m % self.m == 0:
            return self.n * (other.m // self.m) <= other.n
        return self.m % other.m == 0 and self.n <= other.n

    def project(
        self, scores: Real[Tensor, "*rows reduction"], *, absolute: bool = False
    ) -> Bool[Tensor, "*rows reduction"]:
        """Keep the `n` largest scores of every group; see `Pattern.project`."""
        require_groups(self, scores, "a tensor of scores")
        scores = scores.detach().resolve_neg()
        if scores.device.type != "cpu":
            return _project_on_device(scores, self.n, self.m, absolute)
        return _project_native(scores, self.n, self.m, absolute)

    def check(self, weight: Shaped[Tensor, "*rows reduction"]) -> Conformity:
        """Count the groups with at most `n` non-zeros; see `Pattern.check`."""
        require_groups(self, weight, "a weight")
        return check_groups(torch.unflatten(weight.detach(), -1, (-1, self.m)) != 0, self.n, weight, self.m)


def _project_on_device(scores: Tensor, n: int, m: int, absolute: bool) -> Tensor:
    if (n, m) != (2, 4) or scores.dtype not in HALF_OR_SINGLE or not gpu.runs(scores):
        return project_reference(scores, n, m, absolute=absolute)
    if not torch.isfinite(scores).all():
        raise non_finite("a tensor of scores", scores)
    from twofour.patterns.nm_mask_triton import mask

    return mask(scores, absolute=absolute)


def _project_native(scores: Tensor, n: int, m: int, absolute: bool) -> Tensor:
    ranked = scores.to(torch.float32).contiguous() if fits_float32(scores) else None
    if ranked is None:
        return project_reference(scores, n, m, absolute=absolute)
    keep = torch.empty(scores.shape, dtype=torch.bool, device="cpu")
    finite = native.extension().nm_mask(
        mask_row(n, m),
        ranked,
        keep,
        n,
        m,
        absolute,
        native.threads(),
    )
    if not finite:
        raise non_finite("a tensor of scores", scores)
    return keep


def fits_float32(scores: Tensor) -> bool:
    """Whether ranking in float32 loses nothing: float64 and wide integers take the reference."""
    return scores.dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.int16,
    )


def mask_row(n: int, m: int) -> int:
    """Return the index of the fastest native mask kernel for `n`:`m` that may run here (TWOFOUR_ISA caps it)."""
    return native.best("nm_mask", pattern=f"{n}:{m}").index
