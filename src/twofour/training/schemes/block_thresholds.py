"""Blocks that fall below a rising threshold while the only training run goes on.

Narang, Undersander and Diamos 2017, "Block-Sparse Recurrent Neural Networks" (arXiv 1711.02782), section 3, on the
schedule of Narang, Diamos, Sengupta and Elsen 2017, "Exploring Sparsity in Recurrent Neural Networks" (arXiv
1704.05119), section 3. A block goes when its largest |w| is below the threshold, and never comes back. The threshold
rises slowly from `start`, faster from `ramp`, and stands still after `end`. How sparse that makes a model shows while
it trains: `factor` moves it, and `find_factor` looks for the one that ends where it should.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.errors import TrainingError
from twofour.layers import PrunableWeight
from twofour.patterns import Block
from twofour.training.schemes.base import Masking, assigned

QUANTILE = 0.9
"""Of |w| in a trained dense model: the threshold that the schedule aims at (arXiv 1704.05119, section 3)."""

RATIO = 1.5
"""The second slope over the first, phi / theta: 1.2 to 1.7 in 1711.02782; with 1.5 the end is the quantile itself."""

LASSO = 2.5e-5
"""Of the group lasso where none is said: 1e-4 on the plain sum of the norms of 4 x 4 blocks. It pulls at each value of
every block as strongly, whatever its size; the paper's lambda, on the plain sum, is this times N_b^(1/2)."""

_log = logging.getLogger("twofour.training")


@dataclass(frozen=True)
class Rise:
    """When and how fast a threshold rises, in optimiser steps.

    Attributes:
        start: The first step at which blocks may go.
        ramp: The step from which it rises faster.
        end: The last step at which blocks may go.
        every: Steps from one look at the blocks to the next, the paper's `freq`.
        ratio: The second slope over the first.
    """

    start: int
    ramp: int
    end: int
    every: int = 100
    ratio: float = RATIO

    def __post_init__(self) -> None:
        counts = (self.start, self.ramp, self.end, self.every)
        whole = all(type(count) is int for count in counts)
        if (
            not whole
            or not 0 <= self.start <= self.ramp <= self.end
            or self.end < 1
            or self.every < 1
            or self.ratio <= 0
        ):
            raise TrainingError(
                "the schedule's steps are impossible",
                got=f"start={self.start!r}, ramp={self.ramp!r}, end={self.end!r}, every={self.every!r}, "
                f"ratio={self.ratio!r}",
                wanted="whole numbers 0 <= start <= ramp <= end, end and every at least 1, ratio above 0",
                remedy="start after one epoch, ramp at a quarter, end at 40 to 50 % of all steps",
            )

    @classmethod
    def during(cls, steps: int) -> Rise:
        """Return a rise for a run of so many steps: from 5 % on, faster from 22 %, to 45 %.

        The paper trains 20 to 25 epochs and starts with the second; the ramp is at 20 to 25 %, the end at 40 to 50 %
        of them (arXiv 1711.02782, section 3). It looks every 100 steps; a short run has 50 looks all the same.
        """
        start, ramp, end = (max(1, int(share * steps)) for share in (0.05, 0.22, 0.45))
        return cls(start, ramp, end, every=max(1, min(100, (end - start) // 50)))

    def slope(self, quantile: float) -> float:
        """Return theta = 2 q freq / (2 (ramp - start) + 3 (end - ramp)): arXiv 1704.05119, equation 1."""
        return 2 * quantile * self.every / max(2 * (self.ramp - self.start) + 3 * (self.end - self.ramp), 1)

    def threshold(self, step: int, theta: float) -> float:
        """Return the threshold at a step between start and end: arXiv 1704.05119, algorithm 1."""
        if step < self.ramp:
            return theta * (step - self.start + 1) / self.every
        fast = self.ratio * theta * (step - self.ramp + 1)
        return (theta * (self.ramp - self.start + 1) + fast) / self.every


def attach(
    model: nn.Module,
    blocks: tuple[int, int],
    rise: Rise,
    *,
    quantiles: Mapping[str, float] | None = None,
    factor: float = 1.0,
    lasso: float = 0.0,
    skip: str | Sequence[str] = (),
    eligibility: str = "any",
) -> BlockThresholds:
    """Start a schedule; call `step()` after each optimiser step, and add `penalty()` to the loss.

    Args:
        model: A dense model, at the beginning of its training.
        blocks: Outputs and inputs of a block, (4, 4) say.
        rise: When the thresholds rise.
        quantiles: Of each weight, by parameter name, the 0.9 quantile of |w| once it is trained: `quantiles_of` a
            dense model of the same layers. None: of the weights as they are now, smaller than trained ones.
        factor: Multiplies every threshold; beside it stands N_b^(1/4) for blocks of N_b values (1711.02782, section 3).
        lasso: Strength of the group lasso until `end`; 0: none. With it the scheme is the paper's GLP.
        skip: Globs of layers to leave dense.
        eligibility: As in `twofour.prune`.

    Example:
        >>> schedule = block_thresholds.attach(model, (4, 4), Rise(start=500, ramp=2500, end=5000))
        >>> for x, y in loader: (loss(model(x), y) + schedule.penalty()).backward(); optimizer.step(); schedule.step()
        >>> model = schedule.finish()

    Raises:
        TrainingError: The model is masked already, nothing can be pruned, or a number is impossible.
        PatternError: The blocks are impossible.
    """
    pattern = Block(*blocks, 0.0)
    if not (factor > 0 and lasso >= 0):
        raise TrainingError(
            "the strength of a schedule is impossible",
            got=f"factor={factor!r}, lasso={lasso!r}",
            wanted="a positive factor, and a lasso of 0 or more",
            remedy="factor=1.0 is the paper's; find_factor looks for another",
        )
    found = assigned(model, pattern, skip, eligibility=eligibility)
    if quantiles is not None and (missing := [weight.name for weight, _ in found if weight.name not in quantiles]):
        raise TrainingError(
            "a weight has no quantile",
            got=f"`{missing[0]}` and {len(missing) - 1} more" if len(missing) > 1 else f"`{missing[0]}`",
            wanted="the 0.9 quantile of |w| of each weight by its name",
            remedy="block_thresholds.quantiles_of(dense_model) makes them of a trained model of the same layers",
        )
    return BlockThresholds(model, found, rise, quantiles, factor, lasso)


def during(
    blocks: tuple[int, int], *, lasso: float = LASSO, **options: Any
) -> Callable[[nn.Module, int], BlockThresholds]:
    """Return what attaches the paper's GLP to a run, for `finetune(..., scheme=)`: `Rise.during` its steps, and lasso.

    Group lasso and rising thresholds together until the schedule ends, then neither: the masks stay, the rest of the
    training repairs (1711.02782, section 3.3).

    Args:
        blocks: Outputs and inputs of a block.
        lasso: Strength of the group lasso; 0 leaves the thresholds alone.
        options: As for `attach`.
    """
    Block(*blocks, 0.0)
    return lambda model, steps: attach(model, blocks, Rise.during(steps), lasso=lasso, **options)


def quantiles_of(model: nn.Module) -> dict[str, float]:
    """Return the 0.9 quantile of |w| of each parameter with two axes or more, by name: of a trained dense model."""
    return {name: _quantile(p) for name, p in model.named_parameters() if p.ndim > 1 and p.is_floating_point()}


def _quantile(weight: Tensor) -> float:
    sizes = weight.detach().abs().float().flatten()
    return float(sizes.kthvalue(max(1, round(QUANTILE * sizes.numel()))).values)


def group_lasso(weight: Tensor, pattern: Block, smallest: float = 1e-12) -> Tensor:
    """Return the sum over blocks of sqrt(N_b) ||w_block||_2, a scalar: Yuan and Lin 2006, as 1711.02782 weighs blocks.

    Args:
        weight: (out, ..., in).
        pattern: Its blocks.
        smallest: Added below the root, so that the gradient of a block of zeros is zero.
    """
    norms = (pattern.blocks(weight).square().sum((-2, -1)) + smallest).sqrt()
    return norms.sum() * (pattern.r * pattern.c) ** 0.5


class BlockThresholds(Masking):
    """The schedule; the parameters are plain ones, masked more from look to look."""

    def __init__(
        self,
        model: nn.Module,
        found: Sequence[tuple[PrunableWeight, Any]],
        rise: Rise,
        quantiles: Mapping[str, float] | None,
        factor: float,
        lasso: float,
    ) -> None:
        super().__init__(model)
        self.layers = tuple(weight.name for weight, _ in found)
        self.rise, self.factor, self.lasso = rise, factor, lasso
        self._weights: list[tuple[PrunableWeight, Block]] = list(found)
        known = quantiles or {weight.name: _quantile(weight.parameter) for weight, _ in found}
        size = found[0][1].r * found[0][1].c
        self.slopes = {name: rise.slope(known[name]) * size**0.25 * factor for name in self.layers}
        self.steps = 0
        self._begin("block thresholds", [weight.module for weight, _ in found])

    def step(self) -> None:
        """Count one optimiser step, and let blocks go where it is time to look."""
        self.steps += 1
        rise = self.rise
        if rise.start <= self.steps <= rise.end and (self.steps - rise.start) % rise.every == 0:
            self._prune(self.steps)

    @property
    def sparsity(self) -> float:
        """Share of the values of the scheme's weights that are pruned."""
        kept = total = 0
        for weight, _ in self._weights:
            mask = masks.of(self.model).get(weight.name)
            total += weight.parameter.numel()
            kept += weight.parameter.numel() if mask is None else int(mask.keep.sum())
        return 1 - kept / total

    def penalty(self) -> Tensor:
        """Return lasso times the group lasso of all weights until `end`, a zero from then on."""
        if self.lasso == 0 or self.steps >= self.rise.end:
            return self._weights[0][0].parameter.new_zeros(())
        terms = [group_lasso(weight.reduction_last(weight.parameter), pattern) for weight, pattern in self._weights]
        return self.lasso * torch.stack(terms).sum()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside the states of model and optimiser."""
        return {"plan": self._plan(), "steps": self.steps, "masks": masks.state_dict(self.model)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; load the model's own state afterwards.

        Raises:
            TrainingError: The state is of another schedule, or the scheme is over.
            MaskError: Its masks do not fit the model.
        """
        self._require_attached()
        if not {"plan", "steps", "masks"} <= set(state) or {**state["plan"], "slopes": 0} != {
            **self._plan(),
            "slopes": 0,
        }:
            raise TrainingError(
                "the state is of another schedule of thresholds",
                got=str(state.get("plan", f"keys {', '.join(map(str, state))}"))[:400],
                wanted=str(self._plan())[:400],
                remedy="attach with the blocks, steps and layers of the run that is resumed",
            )
        masks.detach(self.model)
        masks.load_state_dict(self.model, state["masks"])
        self.steps, self.slopes = state["steps"], dict(state["plan"]["slopes"])

    def _plan(self) -> dict[str, Any]:
        rise, (_, pattern) = self.rise, self._weights[0]
        steps = [rise.start, rise.ramp, rise.end, rise.every, rise.ratio]
        return {
            "rise": steps,
            "blocks": [pattern.r, pattern.c],
            "layers": list(self.layers),
            "lasso": self.lasso,
            "factor": self.factor,
            "slopes": self.slopes,
        }

    def finish(self) -> nn.Module:
        """Keep the masks as they are; see `Scheme.finish`."""
        self._require_attached()
        self._end()
        return self.model

    @torch.no_grad()
    def _prune(self, step: int) -> None:
        held, plan = masks.of(self.model), []
        for weight, pattern in self._weights:
            values = weight.reduction_last(weight.parameter.detach())
            stays = pattern.scores(values, "max") >= self.rise.threshold(step, self.slopes[weight.name])
            old = held.get(weight.name)
            if old is not None:
                stays &= pattern.blocks(weight.reduction_last(old.keep)).flatten(-2).any(-1)
            if not bool(stays.any()):  # a weight keeps a block
                stays.view(-1)[pattern.scores(values, "max").argmax()] = True
            share = 1 - int(stays.sum()) / stays.numel()
            keep = weight.from_reduction_last(pattern.spread(stays, tuple(values.shape)))
            plan.append((weight, keep.contiguous(), pattern.at(share)))
        masks.attach_all(plan)
        _log.info("step %d: %.1f %% of the values are pruned", step, 100 * self.sparsity)


def find_factor(
    train: Callable[[float], float],
    sparsity: float,
    *,
    least: float = 0.125,
    most: float = 8.0,
    runs: int = 8,
    close: float = 0.01,
) -> float:
    """Return the factor that makes a run end at a wanted sparsity, by false position on its logarithm.

    The first runs halve the interval; once one run was too sparse and one not sparse enough, a line between the two
    says where to look.

    Args:
        train: Trains with a factor and returns the sparsity reached, which grows with the factor; a short run tells.
        sparsity: What is wanted, between 0 and 1.
        least: Smallest factor.
        most: Largest one.
        runs: Runs at most.
        close: How near is near enough.

    Raises:
        TrainingError: A number is impossible, or `train` returns no share.

    Returns:
        The first factor within `close`, else the nearest one; the log says how far off it is then.
    """
    if not (0 < sparsity < 1 and 0 < least < most and runs >= 1):
        raise TrainingError(
            "the search for a factor is impossible",
            got=f"sparsity={sparsity!r}, least={least!r}, most={most!r}, runs={runs!r}",
            wanted="0 < sparsity < 1, 0 < least < most, at least one run",
            remedy="find_factor(train, 0.9)",
        )
    ends: list[tuple[float, float | None]] = [(log(least), None), (log(most), None)]
    best, error = 1.0, float("inf")
    for _ in range(runs):
        place = _between(ends, sparsity)
        factor = exp(place)
        found = _share(train(factor), factor)
        _log.info("factor %.3g: %.1f %% of the values pruned", factor, 100 * found)
        if abs(found - sparsity) < error:
            best, error = factor, abs(found - sparsity)
        if error <= close:
            return best
        ends[0 if found < sparsity else 1] = (place, found)
    _log.warning(
        "the search for a factor ended %.1f points from %.1f %%; the nearest factor is %.3g: allow more than %d runs, "
        "or a wider range of factors",
        *(100 * error, 100 * sparsity, best, runs),
    )
    return best


def _share(found: float, factor: float) -> float:
    if not 0 <= found <= 1:
        raise TrainingError(
            "the search for a factor got no sparsity",
            got=f"{found!r} of the run with factor {factor:.3g}",
            wanted="a share from 0 to 1",
            remedy="let `train` return the sparsity that its run reached",
        )
    return found


def _between(ends: Sequence[tuple[float, float | None]], wanted: float) -> float:
    """Return where to look next: where a line between two measured ends meets `wanted`, else the middle."""
    (low, below), (high, above) = ends
    share = 0.5
    if below is not None and above is not None and above > below:
        share = min(max((wanted - below) / (above - below), 0.1), 0.9)  # an end that stays would slow the search down
    return low + share * (high - low)
