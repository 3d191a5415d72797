"""What `finetune` takes where the caller leaves it open: a loss, an optimiser, its schedule, the number of epochs.

The schedule of the original training is not in a model. Where nobody hands it over, the rate is rewound to the top of a
cycle, which `rates` looks for from a careful one that suits weights of any size, and falls to nothing once more, after
Renda et al. 2020, "Comparing Rewinding and Fine-tuning" (arXiv 2003.02389), who find that repeating the schedule of
rates beats training on at its last rate.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from statistics import median_low
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from twofour.errors import TrainingError, one_of
from twofour.layers import describe_attached
from twofour.training import judge
from twofour.training.batches import Loader, answered, length
from twofour.training.distillation import IGNORED, comparison
from twofour.training.judge import Keep, Loss, first_batch
from twofour.training.plan import Plan, ScheduleFactory, require_repeatable

log = logging.getLogger("twofour.training")

Auto = Literal["auto"]
AUTO: Auto = "auto"
"""Stands for the default of an argument."""

EPOCHS = 3
"""Epochs, as transformers are fine-tuned (Devlin et al. 2019, arXiv 1810.04805, appendix A.3: 2 to 4)."""
LEAST_STEPS, MOST_EPOCHS = 500, 10
"""Steps below which there are more epochs, and how many at most."""
STEP = 1e-3
"""Size of a step at the top of the cycle, relative to the typical weight: the rate that Raffel et al. 2020 (arXiv
1910.10683, section 3.1.2) fine-tune with by Adafactor, whose steps are relative (Shazeer and Stern 2018, arXiv
1804.04235, section 8)."""
DECAY = 0.01
ADVICE = "Another learning rate or more epochs"
"""What may do more than a training that made nothing better, where nothing tells which."""
WARM = 0.1
"""Share of the steps in which the rate rises."""


def completed(
    model: nn.Module, loader: Loader, given: Mapping[str, Any], settings: Mapping[str, Any], keep: str, held: Any
) -> tuple[Plan, list[str]]:
    """Return the plan of a training, checked, and what was chosen in it, a sentence each, which the log has too.

    Args:
        model: What is trained; not changed.
        loader: As a caller gave it.
        given: "loss", "optimizer", "schedule" and "epochs", any of them "auto".
        settings: The other fields of the plan.
        keep: Which state stands: "last", or what a `Judge` calls best.
        held: A loader of the data that judge by "loss", None for batches of `loader`.

    Raises:
        TrainingError: As `finetune`.
    """
    require_repeatable(loader)
    notes = list[str]()
    loss, optimizer, schedule, epochs = (given[name] for name in ("loss", "optimizer", "schedule", "epochs"))
    cycled = is_auto(optimizer) and is_auto(schedule)
    if is_auto(loss):
        loss, name = loss_for(model, loader, settings["seed"])
        notes.append(f"the loss is {name}")
    if is_auto(optimizer):
        optimizer = optimizer_for(model, sought=is_searched(model, settings["scheme"]))
        why = unsearched(model, settings["scheme"])
        rate = "that is looked for" if optimizer.sought else f"of {optimizer.rate:g}, a careful one: {why}"
        kind, way = (
            ("rate", ", up and down in one cycle") if length(loader) else ("constant rate", ", for want of a length")
        )
        notes.append(f"AdamW at a {kind} {rate}{way}" if cycled else f"AdamW at a rate {rate}")
    if is_auto(epochs):
        epochs = epochs_for(loader)
    settings = {**settings, "schedule_every": "step"} if cycled else settings
    plan = Plan(loader, loss, optimizer, None if is_auto(schedule) else schedule, epochs, **settings)
    plan.check()
    plan = _judged(plan, keep, held, model)
    if plan.judge is not None and (judging := plan.judge.held) is not None:
        amount = f"{judging.samples} sample{'s' if judging.samples != 1 else ''}"
        few = ", few to tell states apart" * (judging.samples < judge.LEAST)
        remedy = f"{few}: held= takes {'more' if few else 'others'}" if few or not judging.apart else ""
        apart = "`held`" if judging.apart else "the training, which all states have seen"
        notes.append(f"the state with the least loss stands, on {amount} of {apart}{remedy}")
    if cycled and (steps := length(loader)):
        plan = dataclasses.replace(plan, schedule=cycle(plan.epochs * steps))
    for note in notes:
        log.info("%s", note)
    return plan, notes


def is_auto(given: object) -> bool:
    """Whether an argument is left open."""
    return isinstance(given, str) and given == AUTO


def _judged(plan: Plan, keep: str, held: Any, model: nn.Module) -> Plan:
    """Return the plan with what judges its states.

    Raises:
        TrainingError: There is no such judge, it lacks what it judges by, or the loss on that is not finite.
    """
    one_of("`keep` is not known", keep, ("last", *get_args(Keep)), TrainingError, '"last" is the state after all steps')
    if held is not None and keep != "loss":
        raise TrainingError(
            "nothing is judged by `held`",
            got=f"held= and keep={keep!r}",
            wanted='keep="loss"',
            remedy='keep="loss" keeps the state with the least loss on it; or leave it out',
        )
    if keep == "last":
        return plan
    if plan.scheme is not None:
        raise TrainingError(
            "the states of a model that becomes sparse meanwhile cannot be compared",
            got=f"keep={keep!r} with a scheme",
            wanted='keep="last"',
            remedy="leave `keep` out",
        )
    if keep == "loss":
        judging = judge.trained_on(plan.loader, plan.seed) if held is None else judge.given(held, plan.seed)
        judge.require_finite(model, plan.loss, judging)
        return dataclasses.replace(plan, judge=judge.Judge("loss", plan.loss, judging))
    if plan.evaluate is None:
        raise TrainingError(
            f'`keep="{keep}"` has nothing to go by',
            got="no `evaluate`",
            wanted="a function of the model that returns a number",
            remedy='pass evaluate=, or keep="loss"',
        )
    return dataclasses.replace(plan, judge=judge.Judge(cast(Keep, keep)))


def epochs_for(loader: Loader) -> int:
    """Return how many epochs: 3, or as many as give 500 steps, 10 at most."""
    steps = length(loader)
    return EPOCHS if not steps else max(EPOCHS, min(MOST_EPOCHS, math.ceil(LEAST_STEPS / steps)))


def rate_for(model: nn.Module) -> float:
    """Return `STEP` times the typical size of a weight, to two digits.

    That is the median over the weights of two axes or more of the root mean square of their values that are not zero.

    Raises:
        TrainingError: There is no such weight.
    """
    found = list[float]()
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.is_floating_point() and parameter.requires_grad:
            values = parameter.detach()
            square, count = float(values.double().square().sum()), int((values != 0).sum())
            found += [math.sqrt(square / count)] if count and math.isfinite(square) else []
    if not found:
        raise TrainingError(
            "there is no learning rate for this model",
            got="no weight of two axes that is trained and not zero",
            wanted="a model with weights, or an optimiser",
            remedy="pass optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4)",
        )
    return float(f"{STEP * median_low(found):.1e}")


@dataclasses.dataclass(frozen=True)
class Adamw:
    """Builds AdamW at a rate that no caller gave; where a better one is `sought`, this is the careful one.

    `advice` is what may do more where a training at this rate makes nothing better. `tried`: the steps of the trial
    that chose the rate, a whole cycle, and the loss it came to on data that are held back.
    """

    rate: float
    sought: bool = False
    advice: str = ADVICE
    tried: tuple[int, float] | None = None

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Build the optimiser of parameters."""
        return AdamW(parameters, lr=self.rate, weight_decay=DECAY)


def is_searched(model: nn.Module, scheme: object) -> bool:
    """Whether `rates` can try some from the state that the training begins with, and put that back."""
    return not unsearched(model, scheme)


def unsearched(model: nn.Module, scheme: object) -> str:
    """Return why no rates are tried, "" where they are.

    Not where the model only becomes sparse meanwhile, so that a short trial has another end than the training, nor
    where what is attached to it, low bits too, follows each step.
    """
    if scheme is not None:
        return "none is looked for where a scheme changes the model meanwhile"
    return "none is looked for under what is attached to the model" if describe_attached(model) else ""


def optimizer_for(model: nn.Module, *, sought: bool = False) -> Adamw:
    """Return a factory of AdamW at the careful rate.

    Raises:
        TrainingError: As `rate_for`, or a parameter that is trained is float16.
    """
    half = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if half:
        raise TrainingError(
            "AdamW cannot train weights in float16: what it adds to a divisor, 1e-8, is 0 there",
            got=f"{len(half)} parameters in float16: {', '.join(half[:3])}",
            wanted="float32 or bfloat16",
            remedy="model.float() or model.bfloat16() first, or pass an optimizer= that is made for float16",
        )
    return Adamw(rate_for(model), sought)


def cycle(steps: int) -> ScheduleFactory:
    """Return a schedule that rises over the first tenth of the steps and falls to nothing as half a cosine."""
    rise = max(1, math.ceil(WARM * steps))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise))))

    def build(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, factor)

    return build


def loss_for(model: nn.Module, loader: Loader, seed: int) -> tuple[Loss, str]:
    """Return the loss that the first batch asks for, and its name.

    The model's own, where it answers with a `loss` of one number, as those of transformers do that were given `labels`;
    cross entropy, where targets are whole numbers, one for each row of scores; the squared error, where they are floats
    of the answer's shape.

    Raises:
        TrainingError: None of these, or floats that are all 0 or 1, which may be meant as either.
    """
    require_repeatable(loader)
    inputs, target = first_batch(loader, seed)
    output = answered(model, inputs)
    own: Any = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.numel() == 1:
        return _own, "the model's own"
    found = comparison(output, target)
    if found is not None and isinstance(target, Tensor):
        kind, answer = found
        if kind == "classes" and not target.is_floating_point():

            def cross_entropy(output: Any, target: Any) -> Tensor:
                return F.cross_entropy(answer(output).flatten(0, -2), target.flatten(), ignore_index=IGNORED)

            return cross_entropy, "cross entropy"
        either = bool(((target == 0) | (target == 1)).all())
        if target.is_floating_point() and answer(output).shape == target.shape and not either:

            def squared(output: Any, target: Any) -> Tensor:
                return F.mse_loss(answer(output), target.to(answer(output).dtype))

            return squared, "the squared error"
    described = f"{target.dtype} {tuple(target.shape)}" if isinstance(target, Tensor) else type(target).__name__
    raise TrainingError(
        "the data do not tell which loss is meant",
        got=f"targets {described} for answers of {type(output).__name__}",
        wanted="an answer with a `loss`, whole numbers as classes of scores, or floats of the answer's shape that are "
        "not all 0 or 1",
        remedy="pass loss=, a function of output and target",
    )


def _own(output: Any, target: Any) -> Tensor:
    return output.loss
