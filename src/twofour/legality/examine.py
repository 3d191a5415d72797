"""check: what is promised as sparse in a module, in named tensors, in a file or a folder, is it?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from twofour.checkpoints.kinds import remedy_for
from twofour.errors import FormatError, LayerError, cut
from twofour.files import named
from twofour.layers import Reduction, parse_globs
from twofour.legality.expectation import Expect, Expectation
from twofour.legality.files import subjects_in
from twofour.legality.judge import judge
from twofour.legality.models import subjects_of
from twofour.legality.onnx_file import subjects_in_onnx
from twofour.legality.report import Report
from twofour.legality.subject import FIRST, JUDGED, KINDS, Subject

Progress = Callable[[int, int, str], None]


def check(
    model: nn.Module | str | os.PathLike[str],
    *,
    expect: Expect = None,
    include: str | Sequence[str] = (),
    axes: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Say per prunable weight whether it is sparse as promised, along the right axis, and for which runtimes.

    A weight is promised by its mask, by its packed form, by what its file says of itself (our metadata, the config of
    compressed-tensors, the masks of apex), or by `expect`, which stands above all of them. Groups lie along `in`
    of a Linear weight and along the input channels of a convolution, separately for each kernel position; the
    alignment rules are in `RULES`.

    Args:
        model: A module, whose weights are not changed; or the path of a .safetensors file, of a Hugging Face folder
            with one file or several, or of an .onnx file. Files are read one tensor at a time.
        expect: A pattern promised for every eligible weight, or weight names and their patterns. It stands above what
            masks, packed forms and files say; that no value lies outside a mask is looked at all the same.
        include: Globs of weights in a file to look at; all of them if empty. A weight named here is eligible.
        axes: Globs of weights in a bare file and their reduction axes, 0 or 1.
        progress: Called with how many weights are done, how many there are, and the next one's name.

    Returns:
        A report. `report.ok` is True when every promise holds and at least one weight is promised or sparse.

    Raises:
        PatternError: `expect` does not parse.
        LayerError: `expect`, `include` or `axes` names a weight that is not there, or a weight has no values (meta).
        FormatError: A file is missing, damaged or of no kind that can be read.
        SourceError: A folder's model or an ONNX file needs a package that is not installed.
    """
    if progress is not None and not callable(progress):
        raise LayerError(
            "`progress` cannot be called",
            got=cut(repr(progress), 80),
            wanted="a function of the weights done, of all of them, and of the next one's name",
            remedy="leave it out: nothing is shown then",
        )
    expectation = Expectation.of(expect)
    include, axes = parse_globs(include, "include"), _axes(axes)
    if isinstance(model, nn.Module):
        if include or axes:
            raise LayerError(
                "`include` and `axes` are for files",
                got="a module, which says itself what its weights are",
                wanted="no `include` and no `axes`",
                remedy="name weights in `expect`",
            )
        return _report(*subjects_of(model, expectation), progress)
    if not isinstance(model, str | os.PathLike):
        raise LayerError(
            "there is no model to check",
            got=type(model).__name__,
            wanted="a torch.nn.Module, or the path of a file or folder",
            remedy="for a dict of tensors use twofour.legality.check_weights",
        )
    return _report(*_in_file(named(model, FormatError), expectation, include, axes), progress)


def _axes(axes: object) -> dict[str, int]:
    """Return axes by globs, {} for None."""
    if axes is None:
        return {}
    if not isinstance(axes, Mapping) or not all(isinstance(name, str) for name in axes):
        raise LayerError(
            "`axes` names no reduction axes",
            got=cut(repr(axes), 80),
            wanted='names or globs of weights and 0 or 1, such as {"*.c_attn.weight": 0}',
            remedy="leave it out: axis 1 is that of a Linear and a convolution",
        )
    return dict(axes)


def _in_file(
    path: Path, expectation: Expectation, include: Sequence[str], axes: Mapping[str, int]
) -> tuple[list[Subject], list[tuple[str, str]]]:
    if path.suffix == ".onnx" and not path.is_dir():
        if axes:
            raise LayerError(
                "`axes` is for bare files of weights", got=str(path), wanted="no `axes`: its nodes tell the axes"
            )
        return subjects_in_onnx(path, expectation, include)
    if not path.is_dir() and path.suffix != ".safetensors":
        raise FormatError(
            f"{path} is not a kind of file that can be checked",
            got=f"a {path.suffix or 'nameless'} file" if path.exists() else "no such file or folder",
            wanted="a .safetensors or .onnx file, or a folder with config.json and .safetensors files",
            remedy=remedy_for(path, "a .safetensors or .onnx file, or a Hugging Face folder"),
        )
    return subjects_in(path, expectation, include, axes)


def check_weights(
    weights: Mapping[str, Tensor],
    *,
    expect: Expect = None,
    axes: Mapping[str, int] | None = None,
) -> Report:
    """Say the same about named tensors, for instance the content of a checkpoint; all of them are promised `expect`.

    Tensors with 2 axes are taken as Linear weights (out, in), with 3 to 5 as convolution weights (out, in, kernel...),
    unless `axes` says otherwise. An embedding cannot be told from a Linear weight here.

    Args:
        weights: Tensors by name.
        expect: As in `check`.
        axes: Reduction axes other than 1, by name: 0 for Hugging Face's Conv1D and for transposed convolutions.

    Raises:
        PatternError: `expect` does not parse.
        LayerError: `expect` names a tensor that is not among `weights`, these are no named tensors, an axis is none of
            a layer, or a tensor has no values (meta).
    """
    expectation, axes = Expectation.of(expect), _axes(axes)
    _require_tensors(weights, axes)
    subjects: list[Subject] = []
    skipped: list[tuple[str, str]] = []
    for name, tensor in weights.items():
        if tensor.ndim not in KINDS or not tensor.numel():
            skipped.append((name, f"shape {tuple(tensor.shape)} is no Linear or convolution weight"))
        elif tensor.dtype not in JUDGED:
            skipped.append((name, f"dtype {tensor.dtype} is not floating"))
        else:
            axis = axes.get(name, 1)
            kind, promise = KINDS[tensor.ndim] if axis else FIRST[tensor.ndim], expectation.find(name)
            promise = promise or expectation.everywhere
            shape, by = tuple(tensor.shape), "expect" if promise else None
            subjects.append(Subject(name, kind, shape, Reduction(axis), tensor.detach, promise, by=by))
    expectation.require_known({subject.name for subject in subjects})
    return _report(subjects, skipped, None)


def _require_tensors(weights: object, axes: Mapping[str, int]) -> None:
    found = weights.items() if isinstance(weights, Mapping) else [("", weights)]
    for name, tensor in found:
        if not isinstance(weights, Mapping) or not isinstance(tensor, Tensor) or not isinstance(name, str):
            raise LayerError(
                "there are no named tensors to check",
                got=f"{type(tensor).__name__} under {cut(repr(name), 80)}"
                if isinstance(weights, Mapping)
                else type(tensor).__name__,
                wanted="a dict of names and tensors, as model.state_dict() returns",
                remedy="twofour.check takes a module or a path",
            )
    if wrong := [f"{name}={axis}" for name, axis in axes.items() if axis not in (0, 1)]:
        raise LayerError(
            "a reduction axis is given that no layer has",
            got=", ".join(wrong[:5]),
            wanted="1 for a Linear or a convolution, 0 for Hugging Face's Conv1D or a transposed convolution",
            remedy="leave it out for axis 1",
        )


def _report(subjects: Sequence[Subject], skipped: Iterable[tuple[str, str]], progress: Progress | None) -> Report:
    findings = []
    for done, subject in enumerate(subjects):
        if progress is not None:
            progress(done, len(subjects), subject.name)
        findings.append(judge(subject))
    return Report(tuple(findings), tuple(skipped))
