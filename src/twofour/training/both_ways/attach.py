"""`attach`: which layers, which masks, which kernels; everything is checked before anything changes."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from twofour import calls, masks
from twofour.errors import TrainingError, one_of
from twofour.kernels.conv import Geometry
from twofour.layers import CARRIED, PrunableWeight, attached, remedy_for, require_module, walk
from twofour.patterns import Transposable
from twofour.progress import Progress
from twofour.training import fused
from twofour.training.both_ways.choosing import LEAST_GAIN, Anew, Called, Choosing
from twofour.training.both_ways.convolution import Seen, SparseConv2d, obstacle, products_of
from twofour.training.both_ways.estimate import Estimate
from twofour.training.both_ways.first_masks import first_masks, require_full
from twofour.training.both_ways.handle import TITLE, BothWays
from twofour.training.both_ways.kept_states import processes, require_alone
from twofour.training.both_ways.masked_weight import MaskedWeight
from twofour.training.both_ways.pointwise import pointwise
from twofour.training.fused.modules import is_written_out, put_through
from twofour.training.schemes import require_free
from twofour.training.schemes.sr_ste import DECAY
from twofour.training.sparse_linear import LayerPlan, LinearProducts, Workspace
from twofour.training.sparse_linear.implementations import types
from twofour.training.sparse_linear.module import as_autocast, put_products

_log = logging.getLogger("twofour.training")

_INPUT = "pass the model's input of one batch of the training, without targets"
_FORMS = '"fixed" or "every=K", K steps of the optimiser'


def attach(
    model: nn.Module,
    example: Any,
    *,
    schedule: str = "fixed",
    begin: int = 0,
    decay: float = DECAY,
    gradient: str = "dense",
    kernels: str = "measured",
    state: str = "dense",
    skip: str | Sequence[str] = (),
    eligibility: str = "asp",
    seed: int = 0,
    seconds: float = 0.3,
    progress: bool = True,
) -> BothWays:
    """Train with weights that are 2:4 along both axes: the forward product and the data gradient run on 2:4 kernels.

    Call it where the training step runs (inside `torch.autocast("cpu", torch.bfloat16)`, say), so that kernels are
    measured in its type; a training that computes in another one has them measured again in its first step. The state
    dict stays dense, and parameters and optimiser stay as they are unless `state` is "packed"; weights that moved are
    packed again.
    On a GPU the libraries' kernels of 16 bits take part (docs/gpu.md says what was run on one).

    Args:
        model: Dense or masked "2:4-transposable". Its `nn.Linear` layers take part, and, with dense parameters, its
            convolutions of one group: those of one tap and stride 1 as the products over pixels that they are, an
            `nn.Conv2d` of more by 2:4 convolutions in float32 on the CPU.
        example: A batch of the training's size: a tensor, a tuple of arguments or a dict of keyword arguments.
        schedule: "fixed": the mask is chosen once and the parameter itself is 2:4 after each step. "every=K": the
            parameter stays dense, forward pass and data gradient use its masked values, the mask is chosen again from
            its magnitudes every K steps (Hu et al. 2024, arXiv 2404.01847, whose interval is 40), and the weight's
            gradient reaches every value (straight through).
        begin: Steps to train densely before (dense to sparse).
        decay: With "every=K": decay * w is added to the gradient of pruned values once a step, before the optimiser
            sees it, so that they shrink and the mask settles (SR-STE). The optimiser's own weight decay is its own.
        gradient: The weight gradient: "dense", exact, or "2:4", an unbiased 2:4 estimate of dZ along the tokens (Chmiel
            et al. 2022, arXiv 2203.10991), so that all three products are sparse.
        kernels: "measured": each product of each layer takes what is faster here, dense or 2:4. A layer whose
            products gain less than 5 % together stays dense, without a mask, unless it came with one, `state` is
            "packed", whose half of memory and optimiser every layer gains, or several processes train, which measure
            each by itself. "sparse": 2:4 without measuring; "dense": the control, no mask and the fastest dense
            implementations.
        state: What parameters and the optimiser's state hold. "dense": the whole weight. "packed", with a fixed mask on
            the CPU: the kept values alone, so that gradients, optimiser, clipping and weight decay have half as much
            to do and to remember, by the same rule for each value. A parameter is then (out, in / 2) and the same
            object as before: an optimiser may be built earlier or later, and must step every value by itself (SGD,
            Adam, AdamW, ...; one that is not torch's is tried on a copy, and refused where it mixes values).
            `layer.weight`, the model's state dict and the optimiser's are dense as ever. Not the default: who walks
            over parameters sees another shape. "auto": "packed" where all that takes part can be, else "dense"; the log
            and `handle.state` say which.
        skip: Globs of layers to leave dense.
        eligibility: As in `twofour.prune`.
        seed: Of the estimates.
        seconds: Time box of measuring one product at one shape.
        progress: Show on standard error which layer is measured.

    Returns:
        A handle: `plan`, `finish()`, `remove()`, `state_dict()`.

    Example:
        >>> handle = twofour.training.both_ways.attach(model, x, gradient="2:4")
        >>> print(handle.plan)
        >>> ...  # your own training loop
        >>> model = handle.finish()

    Raises:
        TrainingError: An argument is impossible, something is attached already, the model is masked otherwise, or no
            layer can take part.
        PatternError: A weight holds NaN or infinity, and the mask is chosen now.
    """
    every = _interval(schedule)
    _require_options(begin, decay, gradient, kernels, state, seconds)
    _require_packable(state, every, kernels)
    state, weights, skipped = _taking_part(model, skip, eligibility, every, kernels, state)
    seen = _calls(model, weights, example)
    start = begin if kernels != "dense" else -1
    first = first_masks(model, weights) if start == 0 else {}
    if state == "packed":
        require_full(first)
    came, choosing = masks.of(model), Choosing(gradient, every, kernels, state, seconds)
    plans = _plans(choosing, weights, seen, came, shown=progress)
    first = {one.name: first[one.name] for one, plan in zip(weights, plans, strict=True) if first and not plan.unmasked}
    workspace = Workspace()
    for index, (weight, plan) in enumerate(zip(weights, plans, strict=True)):
        own = (seed * 0x85EBCA6B + index * 0xC2B2AE35) & 0xFFFFFFFF
        _put(weight.module, plan, Anew(choosing, seen[weight.name][0]), own, workspace)
    # What changes gradients and masks; a state may go from one form of the parameters to the other.
    arguments = {"gradient": gradient, "schedule": schedule, "begin": begin}
    arguments |= ({} if every is None else {"decay": decay}) | ({} if gradient == "dense" else {"seed": seed})
    held = {"state": state, "activations": _fuse(model, kernels, seconds), "masked": bool(came), "arguments": arguments}
    held["measured"] = not choosing.keeps_masks and any(weight.name not in came for weight in weights)
    handle = BothWays(model, weights, skipped, every=every, begin=start, decay=decay, first=first, **held)
    _tell(handle)
    return handle


def _plans(
    choosing: Choosing,
    weights: Sequence[PrunableWeight],
    seen: Mapping[str, tuple[Called, torch.dtype]],
    came: Mapping[str, object],
    *,
    shown: bool,
) -> list[LayerPlan]:
    """Return what each layer runs; one that gains too little is to have no mask, unless it came with one."""
    plans = []
    with Progress(shown) as display:
        display.begin("measuring the products of each layer", len(weights))
        for weight in weights:
            display.say(weight.layer)
            called, dtype = seen[weight.name]
            chosen = choosing.choose(called, dtype)
            name = str(dtype).removeprefix("torch.")
            plan = LayerPlan(weight.layer, called.shape, called.tokens, name, chosen, idle=called.idle)
            masked = choosing.keeps_masks or plan.gain >= LEAST_GAIN or weight.name in came
            plans.append(plan if masked else plan.without_mask())
            display.advance()
    return plans


def _put(layer: nn.Module, plan: LayerPlan, anew: Anew, seed: int, workspace: Workspace) -> None:
    """Let a layer run its products."""
    called, moves = anew.called, anew.choosing.every is not None
    if called.convolution is not None:
        put_products(layer, products_of(TITLE, called.convolution.geometry, moves, plan, anew), over=SparseConv2d)
        return
    masked = MaskedWeight(dense_parameter=moves)
    estimate = Estimate(masked, seed, workspace, wanted=anew.choosing.gradient == "2:4")
    sources = {"forward": masked, "data": masked, "weight": estimate}
    put_products(layer, LinearProducts(TITLE, sources, plan, anew=anew), over=pointwise(layer))


def _tell(handle: BothWays) -> None:
    """Log what was attached; that no layer gains is a warning."""
    layers = handle.plan.layers
    _log.info("2:4 both ways: %s", handle.plan.summary.replace("\n", "; "))
    if all(layer.unmasked for layer in layers):
        _log.warning(
            "none of the %d layers gains 5 %% from 2:4 here: all stay dense, without masks. A model that "
            'twofour.prune(model, "2:4-transposable") has pruned before keeps its masks',
            len(layers),
        )


def _fuse(model: nn.Module, kernels: str, seconds: float) -> dict[str, nn.Module]:
    """Serve functions between the layers; returns the activations that got another class, by name."""
    fused.put_on(model, TITLE, "always" if kernels == "sparse" else "measured", seconds)
    free = {name: module for name, module in model.named_modules() if CARRIED not in module.__dict__}
    activations = {name: module for name, module in free.items() if is_written_out(module)}
    for module in activations.values():
        put_through(module, TITLE)
    return activations


def _interval(schedule: str) -> int | None:
    if schedule == "fixed":
        return None
    match = re.fullmatch(r"every=([1-9][0-9]{0,8})", schedule) if isinstance(schedule, str) else None
    if match is None:
        raise TrainingError("the schedule is not known", got=repr(schedule), wanted=_FORMS, remedy='"every=40"')
    return int(match[1])


def _require_options(begin: int, decay: float, gradient: str, kernels: str, state: str, seconds: float) -> None:
    numbers = type(begin) is int and all(isinstance(value, int | float) for value in (decay, seconds))
    if not numbers or begin < 0 or not 0 <= decay < math.inf or not seconds > 0:
        raise TrainingError(
            "an argument is impossible",
            got=f"begin={begin!r}, decay={decay!r}, seconds={seconds!r}",
            wanted="a whole number begin >= 0, a finite decay >= 0, seconds > 0",
            remedy="leave them out",
        )
    for name, value, known in (
        ("gradient", gradient, ("dense", "2:4")),
        ("kernels", kernels, ("measured", "sparse", "dense")),
        ("state", state, ("dense", "packed", "auto")),
    ):
        one_of(f"`{name}` is not known", value, known, TrainingError, "leave it out")


def _taking_part(
    model: nn.Module, skip: str | Sequence[str], eligibility: str, every: int | None, kernels: str, state: str
) -> tuple[str, list[PrunableWeight], dict[str, str]]:
    """Return the state, for "auto" the one that serves, the weights that take part, and why the others do not."""
    if state != "auto":
        return state, *_weights(model, skip, eligibility, every, kernels, state)
    weights, skipped = _weights(model, skip, eligibility, every, kernels, "dense")
    why = _not_packed(model, every, kernels, weights)
    _log.info("state: %s", f'"dense", since {why}' if why else '"packed"')
    return "dense" if why else "packed", weights, skipped


def _not_packed(model: nn.Module, every: int | None, kernels: str, weights: Sequence[PrunableWeight]) -> str:
    """Return why kept values alone cannot hold all that takes part, "" where they can."""
    full = all(2 * int(mask.keep.sum()) == mask.keep.numel() for mask in masks.of(model).values())
    reasons = {
        "the mask moves": every is not None,
        "the control has no mask": kernels == "dense",
        "several processes train": processes() > 1,
        "a mask keeps fewer than two of four": not full,
    }
    others = (weight.name for weight in weights if _reason(weight, "packed", kernels))
    reasons |= {f"`{name}` is no nn.Linear on the CPU": True for name in others}
    return next((reason for reason, holds in reasons.items() if holds), "")


def _require_packable(state: str, every: int | None, kernels: str) -> None:
    if state != "packed":
        return
    if every is not None or kernels == "dense":
        raise TrainingError(
            "kept values alone are no state of this training",
            got=f'schedule="every={every}": pruned values must be there to grow again (SR-STE)'
            if every is not None
            else 'kernels="dense": the control, which has no mask',
            wanted='schedule="fixed" with a mask',
            remedy='state="dense"',
        )
    require_alone()


def _weights(
    model: nn.Module, skip: str | Sequence[str], eligibility: str, every: int | None, kernels: str, state: str
) -> tuple[list[PrunableWeight], dict[str, str]]:
    _require_model(model, every, kernels)
    walked = walk(model, skip=skip, eligibility=eligibility)
    skipped = {left.name: left.reason for left in walked.skipped}
    found = []
    for weight in walked.weights:
        if reason := _reason(weight, state, kernels):
            skipped[weight.name] = reason
        else:
            found.append(weight)
    if not found:
        raise TrainingError(
            "no layer can be trained both ways",
            got="; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:4])
            or "a model without weights",
            wanted="at least one nn.Linear or nn.Conv2d, float32 or 16 bits, both sides multiples of 4",
            remedy='state="dense", the default: convolutions take part in it too'
            if any('state="packed"' in reason for reason in skipped.values())
            else remedy_for(skipped.values()),
        )
    return found, skipped


def _require_model(model: nn.Module, every: int | None, kernels: str) -> None:
    require_module(model, TrainingError)
    if any(attached(module) == TITLE for module in model.modules()):
        raise TrainingError(
            "the model is trained both ways already",
            got="a second attach",
            wanted="a model without a handle",
            remedy="call finish() or remove() of the first handle",
        )
    require_free(model)
    found = masks.of(model)
    wrong = [name for name, mask in found.items() if mask.pattern != Transposable()]
    if wrong or (found and (every is not None or kernels == "dense")):
        raise TrainingError(
            "the model is masked already",
            got=f"{len(found)} masks, {len(wrong)} of another pattern" + (f", the first `{wrong[0]}`" if wrong else ""),
            wanted='a dense model, or (schedule="fixed") one from twofour.prune(model, "2:4-transposable")',
            remedy="prune it again: twofour.masks.detach(model), then "
            'twofour.prune(model, "2:4-transposable", data=...), '
            "best from the dense weights; attach itself has no data to choose by"
            if wrong and every is None
            else "let go with twofour.masks.detach(model); attach chooses masks along both axes itself",
        )


def _reason(weight: PrunableWeight, state: str, kernels: str) -> str | None:
    """Why a weight cannot take part, or None."""
    parameter = weight.parameter
    if state == "packed" and not parameter.is_cpu:
        return f'on {parameter.device}: state="packed" is for the CPU'
    module, kind = weight.module, type(weight.module).__name__
    if weight.attribute != "weight" or (type(module) not in (nn.Linear, nn.Conv2d) and pointwise(module) is None):
        return f"{kind}: only nn.Linear, nn.Conv2d, and an nn.Conv1d of one tap and stride 1, run sparse both ways"
    if state == "packed" and type(module) is not nn.Linear:
        return f'{kind}: state="packed" is for nn.Linear'
    if isinstance(module, nn.Conv2d) and pointwise(module) is None:
        if not parameter.is_cpu:
            return f"{kind} on {parameter.device}: convolutions run sparse on the CPU"
        if reason := "torch's own is the one dense way" if kernels == "dense" else obstacle(module):
            return f"{kind}, {reason}"
    if weight.aliases:
        return f"tied to `{weight.aliases[0]}`"
    known = (torch.float32, *types(parameter.device))
    if (
        type(parameter) is not nn.Parameter
        or not (parameter.is_cpu or parameter.is_cuda)
        or parameter.dtype not in known
    ):
        return (
            f"{parameter.dtype} on {parameter.device}: one of {_listed(known)} is wanted, on the CPU or an NVIDIA GPU"
        )
    if any(size % 4 for size in parameter.shape[:2]):
        return f"{tuple(parameter.shape)}: both sides must be multiples of 4"
    return None


def _calls(model: nn.Module, weights: Sequence[PrunableWeight], example: Any) -> dict[str, tuple[Called, torch.dtype]]:
    """Run the example once and return how each layer was called, and in which type."""
    found: dict[str, tuple[Called, torch.dtype]] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, parameter, seen = calls.first_input(args, kwargs), parameters[name], None
        shape, tokens = (parameter.shape[0], parameter.shape[1]), x.numel() // parameter.shape[1]
        if isinstance(module, nn.Conv2d) and pointwise(module) is None:
            images = x.numel() // max(1, math.prod(x.shape[-3:])), x.shape[-2], x.shape[-1]
            seen = Seen(Geometry.of(module), images, last=not x.is_contiguous())
            shape, tokens = (shape[0], seen.geometry.columns), seen.pixels
        wanted = (("data", x), ("weight", parameter)) if torch.is_grad_enabled() else ()
        idle = tuple(product for product, operand in wanted if not operand.requires_grad)
        found[name] = Called(shape, tokens, parameter.device, seen, idle), as_autocast(x)[0].dtype

    parameters = {weight.name: weight.parameter for weight in weights}
    with (
        calls.explaining(TrainingError, "the example", wanted=calls.FORMS, remedy=_INPUT),
        calls.evaluating(model),
        torch.enable_grad(),  # which products a step takes follows from which inputs want a gradient
        calls.observing([(weight.name, weight.module) for weight in weights], note),
    ):
        calls.Example.of(example).run(model)
    if empty := [name for name, (called, _) in found.items() if not called.tokens]:
        raise TrainingError(
            "the example is empty",
            got=f"`{empty[0]}` sees 0 tokens",
            wanted="a batch of the training's size: kernels are measured at its token counts",
            remedy="pass a batch with samples",
        )
    missing = [weight.name for weight in weights if weight.name not in found]
    known = {weight.name: types(weight.parameter.device) for weight in weights}
    other = [f"{name} in {dtype}" for name, (_, dtype) in found.items() if dtype not in known[name]]
    if missing or other:
        raise TrainingError(
            "the example does not show how the layers are called",
            got="; ".join([f"`{name}` is not called" for name in missing[:3]] + other[:3]),
            wanted=f"each layer called once, in {_listed({dtype for here in known.values() for dtype in here})}",
            remedy="pass a batch of the training as example, under its autocast, and skip= layers it does not reach",
        )
    return found


def _listed(types: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
