"""SOURCE as what is exported: a model whose masks say what is sparse, or a file's weights that keep their promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from twofour import checker, export, masks, quantization
from twofour.checkpoints import Checkpoint
from twofour.cli import source as sources
from twofour.cli.source import Source
from twofour.compiler.replaceable import require_plain
from twofour.errors import MaskError, SourceError
from twofour.export.fill import attach_masks, promised
from twofour.export.fit import require_fit
from twofour.patterns import parse

_SHOWN = 5
"""Weights that an error names."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The content of a file of weights.

    Attributes:
        tensors: Dense tensors by name, tied ones under each of their names.
        patterns: Names of the weights that are sparse, and their patterns.
        axes: Their reduction axes.
    """

    tensors: dict[str, Tensor]
    patterns: dict[str, str]
    axes: dict[str, int]


def weights(found: Source, pattern: str | None) -> Weights:
    """Read the tensors of a file, packed ones unpacked, and what it, or `pattern`, promises of them.

    Without a promise in the file, `pattern` means the weights that `twofour check --expect` means.

    Raises:
        FormatError: The file is truncated, malformed or holds an illegal index.
        SourceError: Nothing is promised, the file promises another pattern, or a promise is broken.
    """
    assert found.path is not None, found
    contents = export.read(found.path)
    dense = {**contents.plain, **{name: packed.unpack() for name, packed in contents.packed.items()}}
    tensors = dense | {alias: dense[name] for alias, name in contents.aliases.items()}
    said = {**Checkpoint.open(found.path).promise.patterns, **promised(contents)}
    _require_agreed(found, said, pattern)
    if not said and pattern is None:
        raise _nothing_sparse(found, "a file that promises nothing of its weights")
    report = checker.check(found.path, expect=None if said else pattern)
    held = [one for one in report.layers if one.promised and (one.name in said or not said)]
    if not held:
        raise _nothing_sparse(found, "no weight that a pattern is promised for")
    if broken := [one for one in held if not one.kept]:
        raise SourceError(
            f"{found.text} is not as sparse as promised",
            got=f"{len(broken)} of {len(held)} promised weights are broken",
            reasons=[f"`{one.name}`: {one.verdict}" for one in broken[:_SHOWN]],
            wanted="weights that keep their pattern",
            remedy="`twofour prune` makes them sparse; `twofour import` finds out which of them are sparse already",
        )
    return Weights(tensors, {one.name: str(one.promised) for one in held}, {one.name: one.reduction for one in held})


def model(found: Source, builder: str | None, pattern: str | None, *, low_bits: bool = False) -> nn.Module:
    """Return the model with masks where its source says that it is sparse.

    Args:
        found: The source.
        builder: The model that a file of weights belongs to.
        pattern: What the weights obey, where the source does not say so.
        low_bits: Whether a model of low bits need not be sparse: the format holds its roundings or codes.

    Raises:
        TwofourError: The model cannot be made, or nothing in it is sparse.
    """
    if found.kind == "file":
        made = _filled(found, builder, pattern)
    elif builder is not None:
        raise SourceError(
            "--model is for a file of weights",
            got=f"--model {builder} beside {found.text}, which is a model itself",
            wanted="no --model",
            remedy="leave --model out",
        )
    else:
        made = _masked(found, pattern)
    bits = quantization.of(made)
    if masks.of(made) or (bits and low_bits):
        return made
    if bits:
        raise SourceError(
            f"nothing in {found.text} is sparse, and the format has no words for its low bits",
            got=f"{type(made).__name__}, {len(bits)} layers of low bits, every weight dense",
            wanted="--to onnx or --to runtime, or a pruned model",
            remedy="twofour.save in Python writes codes of their own width",
        )
    raise _nothing_sparse(found, f"{type(made).__name__}, every weight of it dense")


def _masked(found: Source, pattern: str | None) -> nn.Module:
    made = found.model()
    require_plain(made)
    said = {name: mask.pattern.name for name, mask in masks.of(made).items()} or _promised(found)
    _require_agreed(found, said, pattern)
    if said and not masks.of(made):
        attach_masks(found.path, made, said)
    elif pattern is not None and not said:
        _derive(made, pattern)
    return made


def _promised(found: Source) -> dict[str, str]:
    """Return what the files of a folder promise."""
    return {} if found.path is None else Checkpoint.open(found.path).promise.patterns


def _filled(found: Source, builder: str | None, pattern: str | None) -> nn.Module:
    """Fill a model with a file's weights, and masks where the file or --pattern says that they are sparse."""
    assert found.path is not None, found
    if builder is None:
        raise SourceError(
            f"{found.text} holds weights, and the layers they belong to are not known",
            got="a safetensors file and no --model",
            wanted=" or ".join(sources.FORMS[:3]),
            remedy="--model package.module:function, which builds the model",
        )
    contents, made = export.read(found.path), sources.resolve(builder).model()
    said = promised(contents)
    _require_agreed(found, said, pattern)
    if said or (contents.packed and pattern is None):  # codes of low bits are packed, dense too
        return export.load(found.path, made, masked=True)
    if pattern is None:
        raise SourceError(
            f"{found.path} does not say which of its weights are sparse",
            got="plain weights without a promise",
            wanted="a file that twofour wrote, or --pattern",
            remedy="--pattern 2:4, if that is what its weights obey",
        )
    require_fit(found.path, made, contents)
    made.load_state_dict(contents.plain)
    _derive(made, pattern)
    return made


def _derive(made: nn.Module, pattern: str) -> None:
    try:
        masks.derive(made, pattern)
    except MaskError as error:
        error.remedy = "name the pattern that its weights obey, or make them sparse with `twofour prune`"
        raise


def _require_agreed(found: Source, said: Mapping[str, str], pattern: str | None) -> None:
    """Refuse --pattern where the source itself says another."""
    if pattern is None:
        return
    asked = parse(pattern)
    if other := {name: text for name, text in said.items() if parse(text) != asked}:
        listed = ", ".join(f"`{name}`: {text}" for name, text in list(other.items())[:_SHOWN])
        raise SourceError(
            f"{found.text} says itself what its weights obey, and that is not {asked.name}",
            got=f"{len(other)} of {len(said)} weights in another pattern: {listed}",
            wanted="--pattern for weights of which nothing is said",
            remedy="leave --pattern out",
        )


def _nothing_sparse(found: Source, got: str) -> SourceError:
    return SourceError(
        f"nothing in {found.text} is sparse",
        got=got,
        wanted="a pruned model, or weights that obey a pattern",
        remedy="--pattern 2:4, if that is what its weights obey, or `twofour prune` first",
    )
