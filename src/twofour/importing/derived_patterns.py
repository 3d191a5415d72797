"""Plain weights with zeros in them: the pattern is derived, and verified group by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from twofour.errors import FormatError, TwofourError, cut
from twofour.importing.base import Found, Source, Sparse, malformed, may_be_weight, require_finite
from twofour.layers import Reduction
from twofour.patterns import Conformity, Pattern, parse

KNOWN = ("2:4", "4:8", "8:16")
"""Patterns that are looked for, the strictest first: every 2:4 weight obeys the others too."""

NEARLY = 0.9
"""Fraction of legal groups at which a weight was meant to be sparse; of random zeros in half of its places, 68.75 % of
the groups are 2:4 by chance."""


@dataclass(frozen=True)
class Zeros:
    """Plain safetensors, a folder or a state dict."""

    name: str = "zeros"

    def recognises(self, source: Source) -> bool:
        """See `Format`."""
        return True

    def decode(self, source: Source, axes: Mapping[str, Reduction] | None) -> Found:
        """See `Format`."""
        plain: dict[str, Tensor] = dict(source.tensors)
        if missing := sorted(source.promises.keys() - plain.keys()):
            raise malformed(source, missing[0], "a promise for a weight that is not there", "promises for its weights")
        sparse: dict[str, Sparse] = {}
        notes: list[str] = []
        for name in [name for name, tensor in plain.items() if _may_be_weight(name, tensor, axes)]:
            axis = (axes or {}).get(name, Reduction())
            pattern = _pattern(source, name, plain[name], axis)
            if pattern is not None:
                sparse[name] = Sparse(plain.pop(name), pattern, axis.axis)
            elif axes is None and plain[name].ndim == 2 and _derived(plain[name].t()) is not None:
                notes.append(
                    f"`{name}` stays plain: its zeros lie along axis 0, as in Hugging Face's Conv1D, or it was pruned "
                    "along the wrong axis; read it into its model to know"
                )
        if not sparse:
            raise _none(source, plain, axes, notes)
        return Found(plain, sparse, tuple(notes))


def _may_be_weight(name: str, tensor: Tensor, axes: Mapping[str, Reduction] | None) -> bool:
    return may_be_weight(tensor) and (axes is None or name in axes)


def _pattern(source: Source, name: str, weight: Tensor, axis: Reduction) -> str | None:
    """Return the pattern that a weight obeys, the promised one where there is one."""
    promised = source.promises.get(name)
    if promised is None:
        found = _derived(axis.last(weight))
        if found is not None:
            require_finite(source, name, weight)
        return found
    require_finite(source, name, weight)
    try:
        rule = parse(promised)
        legal = rule.check(axis.last(weight))
    except TwofourError as error:
        raise malformed(source, name, error.got or error.what, f"a weight that {cut(promised, 40)} divides") from error
    if not legal.ok:
        raise malformed(source, name, legal.sentence, f"a weight that keeps the {promised} that the file promises")
    return promised


def _derived(view: Tensor) -> str | None:
    """Return the first of `KNOWN` that a weight, reduction last, obeys; one without values obeys none."""
    values = int(view.count_nonzero())
    if values == 0 or values > view.numel() // 2:
        return None
    return next((rule.name for rule in map(parse, KNOWN) if (legal := _legal(rule, view)) and legal.ok), None)


def _legal(rule: Pattern, view: Tensor) -> Conformity | None:
    return rule.check(view) if view.shape[-1] % rule.group == 0 else None


def _none(
    source: Source, plain: Mapping[str, Tensor], axes: Mapping[str, Reduction] | None, notes: list[str]
) -> FormatError:
    """Say that nothing is sparse, and which weights nearly are."""
    rule, reasons = parse("2:4"), list(notes)
    for name, tensor in plain.items():
        if _may_be_weight(name, tensor, axes) and bool(tensor.ne(0).any()):
            legal = _legal(rule, (axes or {}).get(name, Reduction()).last(tensor))
            if legal and NEARLY <= legal.legal / legal.groups < 1:
                reasons.append(f"`{name}` as 2:4: {legal.sentence} of (out, [spatial], in): {legal.values}")
    return FormatError(
        "the checkpoint holds no sparse weight",
        got=f"{source.path}: {len(plain)} plain tensors",
        wanted=f"a weight that obeys {', '.join(KNOWN)} along its reduction axis, or a format of docs/importing.md",
        remedy="twofour.prune makes a dense model sparse; `twofour check` shows what each weight obeys",
        reasons=reasons[:8],
    )
