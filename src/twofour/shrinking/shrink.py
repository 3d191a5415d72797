"""shrink: a model of a size that is asked for, cut once, with its weights solved anew on calibration data."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from twofour import calibration, measure
from twofour.calibration import Batch
from twofour.errors import ShrinkError, cut, integer_from, one_of
from twofour.files import named
from twofour.journal import Journal, digest, opened
from twofour.layers import require_unwrapped
from twofour.patterns.base import is_finite
from twofour.progress import Progress
from twofour.shrinking.budget import Budget, macs, parameters, size
from twofour.shrinking.build import Built, build, nearest
from twofour.shrinking.curves import Curve
from twofour.shrinking.report import Report, Width, attach, unloadable
from twofour.shrinking.search import Options, Search
from twofour.shrinking.shown import require_shown
from twofour.structure import shrink as structure
from twofour.structure.shrink import Cuttable

_log = logging.getLogger("twofour.shrinking")

JOURNAL = "shrink.json"
"""What notes a search, in the folder of its checkpoint."""

LEAST = 0.125
"""Least share of each group that stays."""

SAMPLES = 128
"""Samples of calibration data, as SparseGPT takes (Frantar and Alistarh 2023)."""


def shrink(
    model: nn.Module,
    example: Any,
    budget: float | Budget = 0.5,
    *,
    data: Any = None,
    samples: int | None = None,
    streams: bool | Literal["auto"] = "auto",
    multiple: int | None = None,
    least: float = LEAST,
    layers: Sequence[str] | Literal["auto"] = (),
    uniform: bool = False,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> nn.Module:
    """Return a smaller model: fewer channels, hidden units and heads, chosen once, within a budget.

    Every group of channels that can be cut without changing anything else (`structure.shrink.channels`) becomes
    narrower where the least is lost for what is saved. With data the loss is second-order, the weights that read the
    channels are solved anew for those that stay, and batch norms take their statistics anew: use it where you cannot
    train, and as the start where you can. Without data channels are ranked by magnitude, and training has to follow.

    Args:
        model: A trained dense model on the CPU or a GPU; it stays as it is.
        example: Input of one forward pass: a tensor, a tuple or list of positional or a dict of keyword arguments.
        budget: Fraction of the parameters that may stay, or a `Budget` of parameters, MACs, bytes or time. A budget of
            time compiles the model, its layers at several widths, and up to four small models.
        data: Calibration data, as in `prune`.
        samples: How many samples of them are used, at least 1. Default: 128.
        streams: Cut residual streams and widths of embeddings too, and channels that a normalisation runs along, which
            computes something else afterwards than with zeros in their place. "auto": where the budget cannot be met
            without, those along which no normalisation runs go too, and `report.notes` says so.
        multiple: Widths are multiples of it, and groups of fewer channels, such as heads, stay whole; default: 16 from
            128 channels on, 8 from 32 on, else 1.
        least: Least share of each group that stays, above 0 and at most 1.
        layers: Names of whole layers to drop, such as "encoder.layer.3"; or "auto": residual blocks and layers compete
            with channels by what they lose on the data for what they save, and as many go as the budget asks for; of
            time more of them, where the small model as measured is too slow with those that went first.
        uniform: Give all layers the same widths, and leave whole what the configuration of a model of transformers
            cannot say, such as the heads of BERT: the folder that `small.save_pretrained` writes then loads with
            `from_pretrained`.
        checkpoint: Folder, new or empty, where what the search has found and the layers that were solved are kept. A
            run that was stopped goes on there when it is called again with the same arguments, and one that ended gives
            the same model at once.
        progress: Show a progress bar while calibrating, on a terminal.

    Returns:
        The small model; `shrinking.report_of(small)` says what was cut and what it cost, `twofour.save` stores the cut.

    Example:
        >>> small = twofour.shrink(model, x, budget=0.5, data=loader)

    Raises:
        ShrinkError: A weight or the example is not finite, an option is impossible, the budget cannot be met (of time
            to 3 %, as measured), nothing can be cut, the model does not run on the example, cannot be captured, or is
            masked, the small model would compute something else on the example than the large one with zeros in place
            of what is cut, or the folder of the checkpoint holds another run or something else.
        DataError: The data cannot be used, are not finite or show nothing: all samples, or all inputs of all that read
            what can be cut, are the same.
    """
    require_unwrapped(model, ShrinkError)
    _require_finite(model)
    limit = Budget.of(budget)
    _require_options(multiple, least, samples, layers)
    one_of("`streams` is impossible", streams, (True, False, "auto"), ShrinkError)
    count = SAMPLES if samples is None else samples
    batches = [] if data is None else calibration.take(model, data, count, tell=_log.warning)
    if batches:
        require_shown(batches)
    if any(isinstance(leaf, Tensor) and leaf.isnan().any() for leaf in tree_leaves(example)):
        remedy = "an input as the model gets it in use"
        raise ShrinkError("the example holds NaN", got="values that are NaN", wanted="finite numbers", remedy=remedy)
    options = Options(limit, streams, uniform, multiple, least, "auto" if layers == "auto" else tuple(layers))
    with ExitStack() as stack:
        display = stack.enter_context(Progress(shown=progress and bool(batches)))
        journal = stack.enter_context(_journal(checkpoint, model, example, batches, options))
        found = Search(model, example, batches, options, journal, display).run()
        built = nearest([build(choice, model, batches, display, journal) for choice in found], model, batches)
    small = built.model
    report = _report(model, example, built)
    if report.unloadable:
        _log.warning("%s", unloadable(report.unloadable))
    _log.info("shrunk: %s", report)
    attach(small, report)
    return small


@contextmanager
def _journal(
    checkpoint: str | Path | None, model: nn.Module, example: Any, batches: Sequence[Batch], options: Options
) -> Iterator[Journal]:
    """Give the journal of a search: in the folder of the checkpoint, or one that ends with the search."""
    if checkpoint is None:
        yield Journal()
        return
    folder = named(checkpoint, ShrinkError, "`checkpoint`")
    shown = {name: repr(value) for name, value in vars(options).items()}
    asked = {
        **{"weights": digest(model), "example": digest(example), "data": digest([one.inputs for one in batches])},
        **{**shown, "threads": torch.get_num_threads(), "machine": measure.processor()},
        "versions": measure.software(),
    }
    asked = json.loads(json.dumps(asked))  # as it is read
    with opened(folder, JOURNAL, asked, ShrinkError, option="checkpoint folder") as journal:
        yield journal


def _report(large: nn.Module, example: Any, built: Built) -> Report:
    """Return the report of a small model, with its sizes beside the large one's, and let its configuration say them."""
    small, found = built.model, built.choice
    counts = parameters, lambda model: macs(model, example), size
    before, multiplied, stored = ((count(large), count(small)) for count in counts)
    widths = tuple(_width(group, found.curves[group.name], found.widths[group.name]) for group in found.groups)
    known: dict[str, Any] = {"milliseconds": found.milliseconds, "timing": found.timing, "layers": found.layers}
    known |= {"unused": found.unused, "config": structure.configure(small, example), "notes": built.notes}
    known |= {"cut": found.plan, "reconstructed": built.reconstructed, "skipped": tuple(built.skipped.items())}
    return Report(widths, found.uncut, before, multiplied, stored, **known)


def _width(group: Cuttable, curve: Curve, width: int) -> Width:
    return Width(group.name, group.size, width, curve.losses[curve.widths.index(width)], curve.source)


def _require_finite(model: nn.Module) -> None:
    """Refuse weights that hold NaN or infinity, which would be cut first or last and hidden."""
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if type(values) is Tensor and not values.is_meta and not is_finite(values):
            raise ShrinkError(
                "the weight holds NaN or infinity",
                got=f"{int((~torch.isfinite(parameter)).sum())} such values",
                wanted="finite weights",
                remedy="look for a diverged training run or a broken checkpoint",
                layer=name,
            )


def _require_options(multiple: object, least: object, samples: object, layers: object) -> None:
    if multiple is not None:
        integer_from(1, "`multiple` is impossible", ShrinkError, "None takes what suits the width", multiple=multiple)
    if samples is not None:
        integer_from(1, "`samples` is impossible", ShrinkError, f"None takes {SAMPLES}", samples=samples)
    named = isinstance(layers, list | tuple) and all(isinstance(name, str) for name in layers)
    if not named and layers != "auto":
        raise ShrinkError(
            "`layers` is impossible",
            got=cut(repr(layers), 40),
            wanted='a list or tuple of names of layers, or "auto"',
            remedy='layers=["encoder.layer.3"]',
        )
    if not isinstance(least, int | float) or isinstance(least, bool) or not 0 < least <= 1:
        raise ShrinkError("`least` is impossible", got=cut(repr(least), 40), wanted="a share above 0 and at most 1")
