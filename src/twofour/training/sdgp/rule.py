"""What is left of a gradient: four estimators of dL/dz with at most N non-zeros in every M output channels.

Shapes: every function takes (samples, pixels, channels), whatever the strides; groups lie along the channels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.errors import PatternError, one_of
from twofour.kernels.nm_gradient import MODES, nm_gradient, nm_gradient_packed, nm_gradient_through, refuses
from twofour.native import gpu
from twofour.patterns import NM, Pattern
from twofour.patterns.nm import HALF_OR_SINGLE, mask_row

LARGEST_GROUP = 32
"""Largest M: the authors' own limit, and what is tested."""

EPS = 1e-4 / 2**16
"""The authors add 1e-4 to the l1 norm of gradients that their loss scaler has multiplied by 2^16 (its initial value).
Against gradients without that factor 1e-4 is no guard but a shrinking: maps of an l1 norm of 1e-4 would be halved."""

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


@dataclass(frozen=True)
class Rule:
    """How a gradient is pruned.

    Attributes:
        n: Values kept in a group, 1 <= n <= m; n == m keeps everything.
        m: Channels in a group, at most 32.
        mode: One of `MODES`.
        eps: Added to the l1 norm that "rescaled" divides by.
    """

    n: int
    m: int
    mode: str = "rescaled"
    eps: float = EPS

    def __post_init__(self) -> None:
        if not 1 <= self.n <= self.m <= LARGEST_GROUP:
            raise PatternError(
                "the pattern of a gradient is impossible",
                got=f"{self.n}:{self.m}",
                wanted="1 <= N <= M <= 32",
                remedy='pass "2:4", which sparse tensor cores and our kernels read',
            )
        one_of(
            "the mode of gradient pruning is unknown",
            self.mode,
            MODES,
            PatternError,
            'leave it out: mode="rescaled" is the default',
        )
        if not isinstance(self.eps, int | float) or not 0 <= self.eps < float("inf"):
            raise PatternError(
                "`eps` is impossible",
                got=repr(self.eps),
                wanted="a number of at least 0",
                remedy="leave it out",
            )

    @classmethod
    def parse(cls, pattern: str | Pattern, mode: str, eps: float) -> Rule:
        """Read "N:M" or an N:M pattern; unlike a weight's, N may equal M: everything is kept, a control.

        Raises:
            PatternError: It is none, or `mode` or `eps` is impossible.
        """
        if isinstance(pattern, NM):
            return cls(pattern.n, pattern.m, mode, eps)
        found = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", pattern.strip()) if isinstance(pattern, str) else None
        if found is None:
            raise PatternError(
                "the pattern of a gradient is not N:M",
                got=repr(pattern),
                wanted='"2:4", "1:4", "8:16", ..., M up to 32',
                remedy='pass "2:4": other patterns are for weights',
            )
        return cls(int(found[1]), int(found[2]), mode, eps)

    @property
    def pattern(self) -> str:
        """The text "N:M"."""
        return f"{self.n}:{self.m}"

    @property
    def draws(self) -> bool:
        """Whether the choice is random."""
        return self.mode in ("random", "unbiased") and self.n < self.m

    @property
    def native(self) -> bool:
        """Whether native kernels know it: 2:4."""
        return (self.n, self.m) == (2, 4)


def pruned(gradient: Tensor, rule: Rule, *, parts: int = 1, generator: torch.Generator | None = None) -> Tensor:
    """Return dL/dz with at most n of every m consecutive channels non-zero.

    * "magnitude" keeps the largest |g|, the lowest channel winning ties, NaN above all.
    * "rescaled" keeps the same and multiplies each (sample, channel) by sum |g| / (sum |kept g| + eps), both sums over
      its pixels in float32 (float64 for float64), so that its l1 norm stays (the authors' `maxnorm`).
    * "random" keeps a uniform choice, without rescaling, as the authors do: the expectation is n/m of g.
    * "unbiased" keeps g_i / p_i with probability p_i: the estimator of least variance, see `_unbiased`.

    The last channels that fill no group of m (of each of `parts`) are kept as they are. 2:4 in float32 and bfloat16 on
    the CPU is one native pass (kernels/nm_gradient), whose random choices follow from one number of the generator.

    Args:
        gradient: (samples, pixels, channels), floating, any strides.
        rule: What to keep.
        parts: Equal parts of the channels that groups may not straddle: the groups of a convolution.
        generator: What random choices are drawn from, on the gradient's device; drawn in the order of the shape, so the
            memory format does not matter.

    Returns:
        The pruned gradient, same shape and dtype, strides preserved where they are dense.
    """
    split = gradient.unflatten(-1, (parts, -1))
    whole = split.shape[-1] // rule.m * rule.m
    if rule.n == rule.m or whole == 0 or gradient.numel() == 0:
        return gradient
    if rule.native and whole == split.shape[-1] and refuses(gradient) is None:
        result = nm_gradient(gradient, rule.mode, eps=rule.eps, seed=_seed(rule, generator))
        return result if gradient.is_contiguous() else torch.empty_like(gradient).copy_(result)
    groups = split[..., :whole].unflatten(-1, (-1, rule.m))
    if rule.mode == "unbiased":
        result = split.clone()
        result[..., :whole] = _unbiased(groups, rule.n, generator).flatten(-2)
        return result.flatten(-2)
    scores = groups
    if rule.mode == "random":
        scores = torch.rand(groups.shape, generator=generator, device=gradient.device, dtype=torch.float32)
    keep = largest(scores, rule.n).flatten(-2)
    if whole < split.shape[-1]:
        keep = torch.cat([keep, keep.new_ones(()).expand(*keep.shape[:-1], split.shape[-1] - whole)], -1)
    kept = _where(keep.flatten(-2), gradient)
    return _rescaled(gradient, kept, rule.eps) if rule.mode == "rescaled" else kept


def packed(gradient: Tensor, rule: Rule, *, generator: torch.Generator | None, out: Tensor | None) -> Tensor:
    """Return what `pruned` returns, packed in the same pass: the left operand of dX = dZ W.

    Args:
        gradient: (samples, pixels, channels) that `kernels.nm_gradient.refuses` takes.
        rule: Of 2:4.
        generator: As in `pruned`; the same choices are drawn from it.
        out: uint8, of at least `kernels.nm_gradient.packed_bytes`.
    """
    return nm_gradient_packed(gradient, rule.mode, eps=rule.eps, seed=_seed(rule, generator), out=out)


def pruned_through(
    upstream: Tensor,
    at: Tensor,
    activation: str,
    rule: Rule | None,
    *,
    generator: torch.Generator | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return dL/dz of y = activation(z) and what `pruned` or, with `out`, `packed` returns of it: from one pass.

    Args:
        upstream: dL/dy, (samples, pixels, channels) that `kernels.nm_gradient.refuses` takes.
        at: z, of the same shape and dtype; of "relu", y serves as well.
        activation: A key of `kernels.epilogue.ACTIVATIONS`.
        rule: Of 2:4, or None: nothing is pruned, the second is None.
        generator: As in `pruned`.
        out: As in `packed`; None: the second is dense.
    """
    if rule is None:
        return nm_gradient_through(upstream, at, activation, None)
    options = {"eps": rule.eps, "seed": _seed(rule, generator)}
    return nm_gradient_through(upstream, at, activation, rule.mode, **options, packed=out is not None, out=out)


def _seed(rule: Rule, generator: torch.Generator | None) -> int:
    return int(torch.randint(2**32, (), generator=generator, device="cpu")) if rule.draws else 0


def largest(scores: Tensor, n: int) -> Tensor:
    """Return the mask of the `n` largest |scores| along the last axis; the lowest index wins ties, NaN is largest.

    Unlike `Pattern.project` it takes NaN and infinity, which a loss scaler meets now and then and must get to see.
    """
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.bfloat16, torch.float16):
        ranked = scores.float().contiguous()
        keep = torch.empty(ranked.shape, dtype=torch.bool, device="cpu")
        m = ranked.shape[-1]
        if native.extension().nm_mask(mask_row(n, m), ranked, keep, n, m, True, native.threads()):
            return keep
    if scores.is_cuda and (n, scores.shape[-1]) == (2, 4) and scores.dtype in HALF_OR_SINGLE and gpu.runs(scores):
        from twofour.patterns.nm_mask_triton import mask

        return mask(scores, absolute=True)
    return largest_reference(scores, n)


def largest_reference(scores: Tensor, n: int) -> Tensor:
    """Do what `largest` does in plain torch, on any device."""
    best = scores.abs().sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, best, True)


def _where(keep: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient where it is kept, else 0, also for NaN; the strides stay where they are dense.

    On bits: `masked_fill` and `where` take one value at a time, 20 times as long on a CPU.
    """
    kept = gradient.clone()
    if kept.dtype not in _BITS:
        return kept.masked_fill_(~keep, 0)
    kept.view(_BITS[kept.dtype]).bitwise_and_(keep.view(torch.int8).to(_BITS[kept.dtype]).neg_())
    return kept


def _rescaled(gradient: Tensor, kept: Tensor, eps: float) -> Tensor:
    exact = torch.promote_types(gradient.dtype, torch.float32)
    # `vector_norm` along this axis takes 100 times as long on a CPU.
    before, after = (g.abs().sum(1, keepdim=True, dtype=exact) for g in (gradient, kept))
    factor = before / (after + eps)
    return kept.mul_(factor.masked_fill_(after == 0, 0))


def _unbiased(groups: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """Return g_i / p_i for n values drawn from every group, each with probability p_i = min(1, c |g_i|), sum p_i = n.

    Any estimator X of g that is unbiased and non-zero with probability p_i has a second moment of g_i^2 / p_i at
    least (Cauchy-Schwarz), reached when its non-zero value is always g_i / p_i; with at most n non-zeros sum p_i <= n.
    The sum of g_i^2 / p_i under that bound is least where p_i is proportional to |g_i|, capped at 1 (Lagrange). So
    this is the N:M mask of least total variance; for 1:2 it is Chmiel et al. 2022 (arXiv 2203.10991): sign(a)
    (|a| + |b|) with probability |a| / (|a| + |b|). The largest k values of a group are capped: k is the least number
    for which the next largest, a, has (n - k) a <= the sum of all but the k largest. They are kept as they are; each
    other value that is drawn becomes sign(g) times that sum over (n - k). Groups with at most n non-zeros are exact.

    Drawing exactly n with these probabilities: systematic sampling. Value i is drawn when an integer plus u, u uniform
    in [0, 1), falls into its piece of the cumulated p: one random number for a group.

    A group with NaN or infinity stays as it is, for a loss scaler to see.
    """
    exact = torch.promote_types(groups.dtype, torch.float32)
    size = groups.abs().to(exact)
    ordered = size.sort(dim=-1, descending=True).values
    rest = ordered.flip(-1).cumsum(-1).flip(-1)[..., :n]  # rest[k]: the sum of all but the k largest
    left = torch.arange(n, 0, -1, device=groups.device, dtype=exact)  # n - k
    over = left * ordered[..., :n] > rest  # for k = 0, 1, ...: true while the next largest must be capped
    capped = over.to(torch.int64).cumprod(-1).sum(-1, keepdim=True).clamp_(max=n - 1)
    share = rest.gather(-1, capped) / left.expand_as(rest).gather(-1, capped)
    p = torch.where(size >= share, (size > 0).to(exact), size / share.clamp(min=torch.finfo(exact).tiny))
    end = p.cumsum(-1)
    end[..., -1] = end[..., -1].round()  # n, or the number of non-zeros
    u = torch.rand(groups.shape[:-1], generator=generator, device=groups.device, dtype=exact).unsqueeze(-1)
    ceiling = (end - u).ceil_()
    drawn = torch.diff(ceiling, dim=-1, prepend=torch.zeros_like(u)) > 0
    value = torch.where(p < 1, share * groups.sign(), groups).to(groups.dtype)
    broken = ~torch.isfinite(size).all(-1, keepdim=True)
    return torch.where(broken, groups, value.masked_fill(~drawn, 0))
