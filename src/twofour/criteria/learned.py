"""Learned masks: the weights are frozen, and which pattern each group takes is trained through the loss.

After Fang et al. 2024, "MaskLLM: Learnable Semi-Structured Sparsity for Large Language Models". Each group of M values
has a logit for each of its candidates, 6 for 2:4. A training step multiplies the weight with the soft mask

    softmax((scale * logits + Gumbel noise) / temperature) @ candidates

and the logits follow the gradient of the loss. The temperature falls and the scale grows, so that the soft masks become
hard; at the end each group takes its largest logit. The logits start with magnitude's mask ahead. A short training may
end worse than it started: the masks with the smaller loss on batches held back from it are kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from twofour import calibration
from twofour.calibration import Batch
from twofour.calibration.gradients import Loss, computed, require_loss, trainable
from twofour.calibration.passes import calibrating, explained
from twofour.calls import Example
from twofour.criteria.base import Criterion
from twofour.errors import RecipeError
from twofour.layers import PrunableWeight
from twofour.patterns import NM, PairedNM, Pattern
from twofour.progress import Progress

_log = logging.getLogger("twofour.criteria")

MOST_CANDIDATES = 256
"""4:8 has 70, 8:16 has 12870: a logit for each would be 800 times the weight."""

SCALE = (1.0, 5.0)
LAST_TEMPERATURE = 0.05

HELD_BACK = 5
"""One batch in so many is not trained on and decides; of fewer batches all serve for both."""


@dataclass(frozen=True)
class Learned(Criterion):
    """Train the choice of each group's pattern; the kept values stay as they are.

    Attributes:
        steps: Training steps; the batches of the data are used in turn.
        rate: Learning rate of the logits (Adam).
        temperature: At the first step; it falls on a straight line to 0.05, as the paper's does from 4.
        prior: How far the logits of candidates that agree with magnitude are ahead at the start.
        seed: Of the Gumbel noise.
    """

    kind = "learned"
    need = "training"

    steps: int = 200
    rate: float = 0.1
    temperature: float = 4.0
    prior: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rate <= 0 or self.temperature < LAST_TEMPERATURE:
            raise RecipeError(
                "the options of learned masks cannot be used",
                got=f"steps={self.steps}, rate={self.rate}, temperature={self.temperature}",
                wanted=f"steps >= 1, rate > 0 and temperature >= {LAST_TEMPERATURE}",
                remedy='"learned" without options takes steps=200, rate=0.1, temperature=4',
            )

    def learn(
        self,
        model: nn.Module,
        weights: Sequence[tuple[PrunableWeight, Pattern]],
        batches: Sequence[Batch],
        loss: Loss,
        display: Progress | None = None,
    ) -> dict[str, Tensor]:
        """Return the learned masks as matrices (groups, rows, in), by the weights' names; the model is unchanged.

        They are the masks that the training started from, with a warning, where those lose less on the batches held
        back. A weight that the loss of no step depends on has no entry: there is nothing to learn from.

        Args:
            model: Runs in evaluation mode; its own modes and `requires_grad` come back.
            weights: What to prune, and the pattern of each.
            batches: What `calibration.take` returned.
            loss: `loss(output, target)`.
            display: Shows progress.

        Raises:
            RecipeError: A pattern has too many candidates.
            DataError: The model does not run on the data, or the loss is no finite number.
        """
        display = display or Progress(shown=False)
        choices = [_Choice(weight, pattern, self.prior) for weight, pattern in weights]
        optimizer = torch.optim.Adam([choice.logits for choice in choices], lr=self.rate)
        device, followed = choices[0].logits.device, set[str]()
        noise = torch.Generator(device).manual_seed(self.seed)
        places = _places(model, weights)
        first = {choice.weight.name: choice.hard() for choice in choices}
        trained = batches[: len(batches) - len(batches) // HELD_BACK]
        with calibrating(model), trainable(model, []), torch.enable_grad():
            for step in range(self.steps):
                batch, share = trained[step % len(trained)], step / max(self.steps - 1, 1)
                temperature = self.temperature + (LAST_TEMPERATURE - self.temperature) * share
                scale = SCALE[0] + (SCALE[1] - SCALE[0]) * share
                soft = [(choice.weight.name, choice.soft(scale, temperature, noise)) for choice in choices]
                masked = {place: weight for name, weight in soft for place in places[name]}
                output = _output(model, masked, calibration.to_device(batch.inputs, device))
                value = require_loss(computed(loss, output, batch, device), batches)
                optimizer.zero_grad(set_to_none=True)
                value.backward()
                slopes = [(choice.weight.name, choice.logits.grad) for choice in choices]
                followed |= {name for name, slope in slopes if slope is not None and bool(slope.any())}
                optimizer.step()
                display.say(f"learning masks, step {step + 1} of {self.steps}, loss {value.item():.4f}")
        choices = [choice for choice in choices if choice.weight.name in followed]
        judge = partial(_loss_under, model, choices, places, batches[len(trained) :] or batches, loss)
        return _better(judge, first, {choice.weight.name: choice.hard() for choice in choices})


class _Choice:
    """The logits of one weight: (groups of a convolution, rows, groups of the pattern, candidates)."""

    def __init__(self, weight: PrunableWeight, pattern: Pattern, prior: float) -> None:
        self.weight = weight
        values = calibration.matrix(weight, weight.parameter.detach())
        self.dense = values.float()
        self.candidates = candidates(pattern, weight.name).to(values.device, torch.float32)
        best = pattern.project(values.flatten(0, 1), absolute=True).view(values.shape)
        kept = self.candidates[0].sum()
        agreement = best.unflatten(-1, (-1, pattern.group)).float() @ self.candidates.T / kept
        self.logits = (prior * (agreement - agreement.mean())).requires_grad_()

    def soft(self, scale: float, temperature: float, noise: torch.Generator) -> Tensor:
        """Return the weight under a soft mask with fresh noise, in its own shape and dtype."""
        uniform = torch.rand(self.logits.shape, generator=noise, device=self.logits.device, dtype=torch.float32)
        gumbel = -(-uniform.clamp_(1e-20, 1 - 1e-7).log()).log()
        return self.under((((scale * self.logits + gumbel) / temperature).softmax(-1) @ self.candidates).flatten(-2))

    def under(self, mask: Tensor) -> Tensor:
        """Return the weight times a mask (groups, rows, in), in its own shape and dtype."""
        return calibration.from_matrix(self.weight, self.dense * mask).to(self.weight.parameter.dtype)

    def hard(self) -> Tensor:
        """Return the mask of the largest logits."""
        return self.candidates[self.logits.detach().argmax(-1)].flatten(-2).bool()


def candidates(pattern: Pattern, name: str) -> Tensor:
    """Return every mask that one group of the pattern may take: bool (candidates, M).

    Raises:
        RecipeError: There are more than 256, or the pattern ties rows together.
    """
    unit = 2 if isinstance(pattern, PairedNM) else 1
    count = math.comb(pattern.m // unit, pattern.n // unit) if isinstance(pattern, NM | PairedNM) else 0
    if not isinstance(pattern, NM | PairedNM) or count > MOST_CANDIDATES:
        raise RecipeError(
            f"masks of the pattern {pattern.name} cannot be learned",
            got=f"{count} candidates for each group" if count else "a pattern whose groups depend on each other",
            wanted=f"N:M or pair-wise N:M with at most {MOST_CANDIDATES} candidates: 2:4 has 6, 4:8 has 70",
            remedy='another pattern for this layer, or the criterion "sparsegpt"',
            layer=name,
        )
    found = torch.zeros(count, pattern.m // unit, dtype=torch.bool, device="cpu")
    for index, kept in enumerate(combinations(range(pattern.m // unit), pattern.n // unit)):
        found[index, list(kept)] = True
    return found.repeat_interleave(unit, dim=1)


@torch.no_grad()
def _loss_under(
    model: nn.Module,
    choices: Sequence[_Choice],
    places: Mapping[str, Sequence[str]],
    batches: Sequence[Batch],
    loss: Loss,
    masks: Mapping[str, Tensor],
) -> float:
    """Return the mean loss over the batches with the weights under hard masks."""
    hard = {choice.weight.name: choice.under(masks[choice.weight.name]) for choice in choices}
    masked = {place: weight for name, weight in hard.items() for place in places[name]}
    device = choices[0].logits.device
    with calibrating(model):
        outputs = (_output(model, masked, calibration.to_device(batch.inputs, device)) for batch in batches)
        values = [float(computed(loss, output, batch, device)) for output, batch in zip(outputs, batches, strict=True)]
    return sum(values) / len(values)


def _better(
    judge: Callable[[Mapping[str, Tensor]], float], first: Mapping[str, Tensor], last: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the last masks, or the first ones of the same weights where those lose less."""
    if not last:
        return last
    before, after = judge(first), judge(last)
    if after <= before:
        return last
    _log.warning(
        "the masks that were learned lose more than those they started from, %.4g against %.4g on batches held back; "
        "the first ones are kept: more steps or a smaller rate may help",
        *(after, before),
    )
    return {name: first[name] for name in last}


def _places(model: nn.Module, weights: Sequence[tuple[PrunableWeight, Pattern]]) -> dict[str, list[str]]:
    """Return where each weight stands, by its name: each attribute of a module once, however often it is registered."""
    names = {id(weight.parameter): weight.name for weight, _ in weights}
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in names:
                found[names[id(parameter)]].append(f"{prefix}.{attribute}".lstrip("."))
    return found


def _output(model: nn.Module, masked: dict[str, Tensor], inputs: Any) -> Any:
    given = Example.of(inputs)
    with explained():
        # Tied names would swap a module of two names twice, and put the swapped tensor back as its weight.
        return functional_call(model, masked, given.args, given.kwargs, tie_weights=False)
