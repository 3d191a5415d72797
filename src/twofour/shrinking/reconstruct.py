"""reconstruct: the weights that read cut channels are solved anew for those that stay, layer by layer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from twofour import calibration, calls
from twofour.calibration import Batch, Statistics
from twofour.checkpoints import write_tensors
from twofour.files import replacing
from twofour.journal import Journal, digest
from twofour.layers import PrunableWeight
from twofour.progress import Progress
from twofour.shrinking.curves import bias_of, covariance, positions, shown
from twofour.structure import shrink as structure
from twofour.structure.shrink import AxisCut, Cut

_log = logging.getLogger("twofour.shrinking")


def gone_columns(weight: PrunableWeight, plan: Cut) -> Tensor | None:
    """Return (in,) booleans of the columns of a weight's matrix that a plan cuts, None where it cuts none."""
    axis = weight.axis.axis
    kept = next((plan.kept[name, axis] for name in weight.names if (name, axis) in plan.kept), None)
    if kept is None or len(weight.feeds) != 1 or getattr(weight.module, "groups", 1) != 1:
        return None
    gone = torch.ones(weight.parameter.shape[axis], dtype=torch.bool, device="cpu")
    gone[list(kept)] = False
    return gone[positions(weight)]


def reconstruct(
    model: nn.Module,
    plan: Cut,
    weights: Sequence[PrunableWeight],
    batches: Sequence[Batch],
    display: Progress,
    journal: Journal,
    layers: Sequence[str] = (),
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Solve weights for the columns that a plan leaves; what it cuts becomes zero, and a bias takes up its mean.

    In the order of the calls: what comes later sees the inputs that the solved layers before it give. For a weight W
    whose inputs have mean m and covariance C the columns K that stay become W_K + W_B C_BK C_KK^-1, and the bias
    gains W_B m_B less what the change of W_K gives. A weight that a stopped run has solved is put in as it left it.

    Args:
        model: A copy of the large model; it is changed.
        plan: What is cut of it.
        weights: Of the copy.
        batches: Calibration data.
        display: Shows progress.
        journal: Keeps what is solved.
        layers: That the copy lacks: what is solved without them is another solution.

    Returns:
        Names of the weights that were solved, and of those that were not, with the reason: the data do not show them,
        or they are tied, and what solves them for one layer is wrong for the other.
    """
    found = {weight.name: gone for weight in weights if (gone := gone_columns(weight, plan)) is not None}
    tied = {weight.name: f"it is `{weight.aliases[0]}` too" for weight in weights if weight.aliases}
    tied = {name: reason for name, reason in tied.items() if name in found}
    solved: set[str] = set()
    constant: dict[str, str] = {}
    place = f"{digest(list(layers))}-" if layers else ""

    def file(weight: PrunableWeight) -> Path | None:
        return None if journal.folder is None else journal.work(f"{place}{weight.name}")

    def visit(weight: PrunableWeight, statistics: Statistics) -> None:
        if not shown(statistics):
            constant[weight.name] = "the data show no differences of its inputs"
        else:
            _solve(weight, statistics, found[weight.name])
            _keep(weight, file(weight))
            solved.add(weight.name)

    chosen = [weight for weight in weights if weight.name in found and weight.name not in tied]
    solved |= {weight.name for weight in chosen if _known(weight, file(weight))}
    left = [weight for weight in chosen if weight.name not in solved]
    with _normalised(model, plan):
        skipped = calibration.calibrate(model, left, batches, "hessian", visit, display=display) if left else {}
    return tuple(weight.name for weight in chosen if weight.name in solved), {**skipped, **constant, **tied}


def tensors_of(weights: Sequence[PrunableWeight], plan: Cut) -> dict[str, Tensor]:
    """Return the weights that a plan cuts columns of, and their biases, by the names that they have in the model."""
    return {n: t for weight in weights if gone_columns(weight, plan) is not None for n, t in _tensors(weight).items()}


@contextmanager
def _normalised(model: nn.Module, plan: Cut) -> Iterator[None]:
    """Let normalisations that run along what is cut run over what stays inside, as the small model's will.

    Channels that go keep the values that they had: what they gave is to be made up for. Normalisations are known by the
    names of their classes, such as LlamaRMSNorm; those that a forward computes without a layer stay as they are.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            axes = {kept for (tensor, _), kept in plan.kept.items() if tensor.rpartition(".")[0] == name}
            held = dict(module.named_parameters())
            flat = held and all(p.ndim == 1 and (f"{name}.{n}".lstrip("."), 0) in plan.kept for n, p in held.items())
            norm = "norm" in type(module).__name__.lower() and not isinstance(module, _NormBase)
            if flat and norm and len(axes) == 1 and not list(module.children()):
                (kept,) = axes
                stack.callback(module.register_forward_hook(_over(module, name, plan, kept)).remove)
        yield


def _over(module: nn.Module, name: str, plan: Cut, kept: tuple[int, ...]) -> Callable[..., Tensor | None]:
    """Return a hook that puts what a narrow copy of a normalisation gives in the places of the channels that stay."""
    size = next(module.parameters()).shape[0]
    beside = nn.ModuleDict({"it": copy.deepcopy(module)})
    narrow = structure.cut(beside, _alone(module, name, plan, size, kept), inplace=True).get_submodule("it")
    axis = 1 if isinstance(module, nn.GroupNorm) else -1

    def put(_: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or x.shape != output.shape:
            return None
        if x.shape[axis] != size:
            return None
        places = torch.tensor(kept, dtype=torch.int64, device=x.device)
        return output.index_copy(axis, places, narrow(x.index_select(axis, places)).to(output.dtype))

    return put


def _alone(module: nn.Module, name: str, plan: Cut, size: int, kept: tuple[int, ...]) -> Cut:
    """Return the part of a plan that is a layer's own."""
    own = tuple(replace(one, module="it") for one in plan.attributes if one.module == name)
    return Cut((AxisCut(size, kept, tuple((f"it.{n}", 0) for n, _ in module.named_parameters())),), own)


def _tensors(weight: PrunableWeight) -> dict[str, Tensor]:
    """Return what is solved of a weight's layer, by the names that it has in the model."""
    bias, name = bias_of(weight), f"{weight.layer}.{weight.attribute.replace('weight', 'bias')}"
    return {weight.name: weight.parameter.detach()} | ({} if bias is None else {name: bias.detach()})


def _keep(weight: PrunableWeight, file: Path | None) -> None:
    """Write a solved layer for a later run, where one is to know it."""
    if file is not None:
        with replacing(file) as temporary:
            write_tensors(temporary, _tensors(weight), {})


@torch.no_grad()
def _known(weight: PrunableWeight, file: Path | None) -> bool:
    """Put in the solved layer of an earlier run; tell whether there is one. A file that is damaged is none."""
    if file is None or not file.exists():
        return False
    tensors = _tensors(weight)
    try:
        stored = load_file(file)
    except (OSError, SafetensorError) as error:
        _log.warning("%s cannot be read, and `%s` is solved again: %s", file, weight.name, error)
        return False
    fits = stored.keys() == tensors.keys() and all(stored[n].shape == t.shape for n, t in tensors.items())
    for name, tensor in tensors.items() if fits else ():
        tensor.copy_(stored[name])
    torch.clear_autocast_cache()
    return fits


@torch.no_grad()
def _solve(weight: PrunableWeight, statistics: Statistics, gone: Tensor) -> None:
    values = calibration.matrix(weight, weight.parameter.detach())[0].to("cpu", torch.float64)
    moments, mean = covariance(weight, statistics)
    lost = values[:, gone]
    change = torch.linalg.solve(moments[~gone][:, ~gone], moments[~gone][:, gone] @ lost.T).T
    new = torch.zeros_like(values)
    new[:, ~gone] = values[:, ~gone] + change
    parameter = weight.parameter
    parameter.copy_(calibration.from_matrix(weight, new.unsqueeze(0)).to(parameter))
    bias = bias_of(weight)
    if bias is not None:
        bias += (lost @ mean[gone] - change @ mean[~gone]).to(bias)
    torch.clear_autocast_cache()  # a caller's autocast would go on with what it casted of the old values


def batch_norms(model: nn.Module) -> list[Any]:
    """Return the batch norms of a model that keep statistics."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


def norms_said(model: nn.Module, batches: Sequence[Batch], count: int) -> tuple[str, ...]:
    """Return a sentence about batch norms whose statistics are the large model's, none where there are none.

    Args:
        model: The small model.
        batches: The calibration data.
        count: Of how many batch norms the statistics were taken anew.
    """
    left = len(batch_norms(model)) - count
    because = (
        "the data do not reach them, or are one sample, or one value a channel"
        if batches
        else "there are no calibration data"
    )
    said = f"{left} batch norms keep the means and variances of the large model: {because}; train the small model"
    return (said,) if left else ()


@torch.no_grad()
def refit_norms(model: nn.Module, batches: Sequence[Batch]) -> int:
    """Take the statistics of batch normalisations anew from calibration data; return of how many.

    Batch norms behind cut channels see other means and variances. Where the data are too few (one value a channel) all
    stay as they are, and those that the data do not reach do in any case.
    """
    norms = batch_norms(model)
    if not norms:
        return 0
    before = [{name: value.clone() for name, value in norm.named_buffers()} for norm in norms]
    try:
        with calls.evaluating(model), _training(norms):
            for batch in batches:
                calls.Example.of(batch.inputs).run(model)  # a forward may change what it is given
    except Exception as error:  # a batch of one: torch has no variance of it
        _log.warning("the statistics of batch norms stay as they were: %s", error)
        unreached = norms
    else:
        unreached = [norm for norm in norms if not int(norm.get_buffer("num_batches_tracked"))]
    for norm, buffers in zip(norms, before, strict=True):
        for name, value in buffers.items() if norm in unreached else ():
            norm.get_buffer(name).copy_(value)
    return len(norms) - len(unreached)


@contextmanager
def _training(norms: Sequence[Any]) -> Iterator[None]:
    """Let batch norms average the statistics of all batches inside."""
    momentum: Mapping[int, Any] = {id(norm): norm.momentum for norm in norms}
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    try:
        yield
    finally:
        for norm in norms:
            norm.momentum = momentum[id(norm)]
