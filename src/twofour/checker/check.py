"""check and Report: what is promised as sparse in a module, in named tensors, in a file or a folder, is it?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite

from torch import Tensor, nn

from twofour.checker.judge import Finding, judge
from twofour.checker.sources import weights_in, weights_of
from twofour.checker.weights import FIRST, JUDGED, KINDS, Expect, Expectation, Skipped, Weight
from twofour.errors import FormatError, LayerError, cut
from twofour.files import named
from twofour.layers import Reduction, parse_globs, require_unwrapped

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Report:
    """What was found in a model or a file.

    Attributes:
        layers: One finding per prunable weight.
        skipped: (name, reason) of weights that were not looked at.
    """

    layers: tuple[Finding, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Every promise holds, and something is promised, sparse or of low bits: a plain dense model is not ok."""
        promised = [finding for finding in self.layers if finding.promised]
        low = [finding for finding in self.layers if finding.width]
        if promised or low:
            return all(finding.kept for finding in promised) and not any(finding.broken for finding in low)
        return any(finding.sparse for finding in self.layers)

    @property
    def summary(self) -> str:
        """One sentence: how many promises hold, how many weights are sparse."""
        promised = [finding for finding in self.layers if finding.promised]
        sparse = sum(finding.sparse for finding in self.layers)
        text = "nothing was promised" if sparse else "nothing is sparse, and nothing was promised to be"
        if promised:
            text = f"{sum(finding.kept for finding in promised)} of {len(promised)} promised weights kept"
        if low := sum(finding.width is not None for finding in self.layers):
            text += f", {low} of low bits"
        return f"{text}; {sparse} of {len(self.layers)} weights are sparse, {len(self.skipped)} skipped"

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON-ready values: NaN and infinities, which JSON lacks, as text."""
        return {
            "ok": self.ok,
            "summary": self.summary,
            "layers": [
                asdict(finding) | {"values": [value if isfinite(value) else str(value) for value in finding.values]}
                for finding in self.layers
            ],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
        }

    def __str__(self) -> str:
        head = ("weight", "kind", "shape", "promised", "legal", "zeros", "-0.0", "ties", "ready for", "verdict")
        lines = [_grid(head, [_row(finding) for finding in self.layers])] if self.layers else []
        if told := [(finding.name, note) for finding in self.layers for note in finding.notes]:
            lines += ["", _grid(("weight", "note"), told)]
        if self.skipped:
            lines += ["", _grid(("skipped", "reason"), self.skipped)]
        plain = not any(finding.promised or finding.sparse or finding.width for finding in self.layers)
        head = "OK" if self.ok else "DENSE" if plain else "NOT OK"
        return "\n".join([*lines, "", f"{head}: {self.summary}"]).lstrip("\n")


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
        A report. `report.ok` is True when every promise holds and at least one weight is promised, sparse or of low
        bits; of the latter the whole numbers are looked at, times their scales.

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
        require_unwrapped(model)
        if include or axes:
            raise LayerError(
                "`include` and `axes` are for files",
                got="a module, which says itself what its weights are",
                wanted="no `include` and no `axes`",
                remedy="name weights in `expect`",
            )
        return _report(*weights_of(model, expectation), progress)
    if not isinstance(model, str | os.PathLike):
        raise LayerError(
            "there is no model to check",
            got=type(model).__name__,
            wanted="a torch.nn.Module, or the path of a file or folder",
            remedy="for a dict of tensors use twofour.checker.check_weights",
        )
    return _report(*weights_in(named(model, FormatError), expectation, include, axes), progress)


def _axes(axes: object) -> dict[str, int]:
    """Return axes by names or globs, {} for None."""
    if axes is None:
        return {}
    if not isinstance(axes, Mapping) or not all(isinstance(name, str) for name in axes):
        raise LayerError(
            "`axes` names no reduction axes",
            got=cut(repr(axes), 80),
            wanted='names or globs of weights and 0 or 1, such as {"*.c_attn.weight": 0}',
            remedy="leave it out: axis 1 is that of a Linear and a convolution",
        )
    if wrong := [f"{name}={axis}" for name, axis in axes.items() if axis not in (0, 1)]:
        raise LayerError(
            "a reduction axis is given that no layer has",
            got=", ".join(wrong[:5]),
            wanted="1 for a Linear or a convolution, 0 for Hugging Face's Conv1D or a transposed convolution",
            remedy="leave it out for axis 1",
        )
    return dict(axes)


def check_weights(
    weights: Mapping[str, Tensor],
    *,
    expect: Expect = None,
    axes: Mapping[str, int] | None = None,
    widths: Mapping[str, str] | None = None,
) -> Report:
    """Say the same about named tensors, for instance the content of a checkpoint; all of them are promised `expect`.

    Tensors with 2 axes are taken as Linear weights (out, in), with 3 to 5 as convolution weights (out, in, kernel...),
    unless `axes` says otherwise. An embedding cannot be told from a Linear weight here.

    Args:
        weights: Tensors by name.
        expect: As in `check`.
        axes: Reduction axes other than 1, by name: 0 for Hugging Face's Conv1D and for transposed convolutions.
        widths: Of weights of low bits their widths, by name: what the report calls them.

    Raises:
        PatternError: `expect` does not parse.
        LayerError: `expect` names a tensor that is not among `weights`, these are no named tensors, an axis is none of
            a layer, or a tensor has no values (meta).
    """
    expectation, axes = Expectation.of(expect), _axes(axes)
    _require_tensors(weights)
    found: list[Weight] = []
    skipped: Skipped = []
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
            given = (name, kind, shape, Reduction(axis), tensor.detach, promise)
            found.append(Weight(*given, by=by, width=(widths or {}).get(name)))
    expectation.require_known({weight.name for weight in found})
    return _report(found, skipped, None)


def _require_tensors(weights: object) -> None:
    pairs = weights.items() if isinstance(weights, Mapping) else ((None, weights),)
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor) or not isinstance(name, str):
            raise LayerError(
                "there are no named tensors to check",
                got=type(tensor).__name__ + (f" under {cut(repr(name), 80)}" if isinstance(weights, Mapping) else ""),
                wanted="a dict of names and tensors, as model.state_dict() returns",
                remedy="twofour.check takes a module or a path",
            )


def _report(weights: Sequence[Weight], skipped: Iterable[tuple[str, str]], progress: Progress | None) -> Report:
    findings = []
    for done, weight in enumerate(weights):
        if progress is not None:
            progress(done, len(weights), weight.name)
        findings.append(judge(weight))
    return Report(tuple(findings), tuple(skipped))


def _row(finding: Finding) -> tuple[str, ...]:
    ready = dict.fromkeys(fit.runtime for fit in finding.fits if fit.ready)
    return (
        finding.name,
        finding.kind,
        "x".join(map(str, finding.shape)),
        finding.promised or "-",
        f"{finding.legal_fraction:.1%}",
        f"{finding.zeros:.1%}",
        str(finding.negative_zeros) if finding.negative_zeros else "-",
        str(finding.ties) if finding.ties else "-",
        ", ".join(ready) or "-",
        finding.verdict,
    )


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    table = [tuple(head), *map(tuple, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    lines.insert(1, "  ".join("-" * width for width in widths[:-1]) + "  " + "-" * len(head[-1]))
    return "\n".join(lines)
