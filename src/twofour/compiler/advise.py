"""advise: measured per layer, which pattern will make this model faster on this machine, before anything is pruned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twofour import native
from twofour.compiler.advice import Advice, Raced, judged
from twofour.compiler.advise_low_bits import low_bit_images, low_bit_linears, low_bit_rows, require_group
from twofour.compiler.choose import Progress, choose, require_room
from twofour.compiler.choose_recurrent import raced_patterns
from twofour.compiler.computing import Computing, dtype_name
from twofour.compiler.recurrent_kinds import is_recurrent
from twofour.compiler.replaceable import attention_parts, refusal, require_cpu, require_plain, require_tokens
from twofour.compiler.terms import Terms
from twofour.errors import CompileError, KernelError, PatternError
from twofour.layers import PrunableWeight, walk
from twofour.packing import Packed
from twofour.patterns import Pattern, parse
from twofour.patterns.base import is_finite, non_finite
from twofour.quantization import Widths

PATTERNS = ("2:4", "block:16x16@0.5", "block:16x16@0.9")
"""What is measured: both ways of leaving out half, and the share of blocks that nets are trained to."""

_IMAGES = (
    "a convolution: its time follows from its images; compile(prune(model, pattern), images) measures it sparse and "
    "dense, and its plan has both times"
)
_CODES = "a convolution: twofour.compile measures it on the images of an example"


def advise(
    model: nn.Module,
    *,
    patterns: str | Pattern | Sequence[str | Pattern] = PATTERNS,
    tokens: Sequence[int] = (1, 8, 128),
    dtype: str | torch.dtype = "float32",
    group: int | None = None,
    skip: Sequence[str] = (),
    widths: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> Advice:
    """Measure, per eligible layer, the best dense kernel against the best of each pattern; the model is not changed.

    Layers are Linears, and LSTMs, GRUs, RNNs and cells. The weights are pruned by magnitude for the measurement only:
    what counts for time is the pattern. What a pattern costs in accuracy is not asked here.

    Args:
        model: Any model on the CPU with weights that `compile` takes at this `dtype`.
        patterns: What to measure.
        tokens: Token counts (batch times sequence length) to measure; of a recurrent layer steps of one sequence.
        dtype: Computing type, as for `compile`.
        group: For int4, as for `compile`; with `widths`, inputs that share a scale in those, a divisor of them all.
            Layers of low bits are measured in their own groups beside.
        skip: Layer globs to leave out.
        widths: Low bits to measure in each Linear beside the patterns: "w2a2", "w1.58a8". Layers of low bits
            (`twofour.quantize`) are measured in their own. Where any are, dense int8 is measured too, as "int8".
        progress: Called with layers done, layers in all and the layer that is measured next.

    Raises:
        CompileError: The token counts are impossible, there is no pattern, the model is compiled or not on the CPU, or
            no layer is eligible.
        PatternError: A text is no pattern, or a weight holds NaN or infinity.
        QuantizationError: A text is no width.
    """
    chosen, asked = _parsed(patterns), _widths(widths)
    require_tokens(tokens)
    require_plain(model)
    require_cpu(model)
    computing, parts = _computing(dtype, group, asked), attention_parts(model)
    found = walk(model, skip=skip)
    reasons = {entry.name: _refusal(entry.module, entry.layer in parts, computing) for entry in found.weights}
    skipped = [(entry.name, entry.reason) for entry in found.skipped]
    low, images = low_bit_linears(model, skip), low_bit_images(model, skip)
    taken = {f"{name}.weight".lstrip(".") for name in low}
    skipped = [(name, _CODES if name in images else reason) for name, reason in skipped if name not in taken]
    refused = [(entry.name, reason) for entry in found.weights if (reason := reasons[entry.name]) is not None]
    skipped += [(name, reason) for name, reason in refused if name not in taken]
    entries = [entry for entry in found.weights if reasons[entry.name] is None]
    names = dict.fromkeys(entry.layer for entry in entries)
    layers = {name: [entry for entry in entries if entry.layer == name] for name in names}
    if not layers and not low:
        raise _nothing(skipped, computing, chosen)
    sizes = [entry.rows + entry.reduction for entry in entries] + [sum(module.weight.shape) for module in low.values()]
    require_room(tokens, max(sizes))
    terms = Terms(computing, "fast", tuple(tokens))
    held = [entry.parameter.nbytes for entry in entries] + [module.weight.nbytes for module in low.values()]
    measuring = _Measuring(chosen, terms, sum(held), skipped, group)
    rows = judged(list(measuring.rows(layers, low, asked, progress)))
    if not rows:
        raise _nothing(skipped, computing, chosen)
    terms.cache.finish()
    texts = tuple(dict.fromkeys((*(pattern.name for pattern in chosen if layers), *(row.pattern for row in rows))))
    return Advice(rows, tuple(skipped), tuple(tokens), native.threads(), native.isa_text(), texts)


def _parsed(patterns: object) -> tuple[Pattern, ...]:
    given = [patterns] if isinstance(patterns, str | Pattern) else patterns
    if not isinstance(given, Sequence) or not given:
        raise CompileError(
            "there is no pattern to measure",
            got=repr(patterns),
            wanted="the text of a pattern, or several",
            remedy=f"leave `patterns` out for {', '.join(PATTERNS)}",
        )
    return tuple(dict.fromkeys(map(parse, given)))


def _widths(widths: object) -> tuple[Widths, ...]:
    given = [widths] if isinstance(widths, str) or not isinstance(widths, Iterable) else widths
    return tuple(dict.fromkeys(map(Widths.parse, given)))  # pyright: ignore[reportUnknownArgumentType]


def _computing(dtype: str | torch.dtype, group: int | None, widths: Sequence[Widths]) -> Computing:
    name = dtype_name(dtype)
    return Computing.of(name, group=require_group(group, name, bool(widths)))


def _nothing(skipped: Sequence[tuple[str, str]], computing: Computing, patterns: Sequence[Pattern]) -> CompileError:
    if any(reason == _IMAGES for _, reason in skipped):
        return CompileError(
            f"nothing but convolutions of the model can run {' or '.join(pattern.name for pattern in patterns)} here",
            reasons=[f"{name}: {reason}" for name, reason in skipped],
            wanted="a Linear or a recurrent layer: how long a convolution takes follows from its images",
            remedy=f'print(twofour.compile(twofour.prune(model, "{patterns[0].name}"), images).plan): each convolution '
            "measured sparse and dense",
        )
    return CompileError(
        f"no layer of the model can run {' or '.join(pattern.name for pattern in patterns)} here",
        reasons=[f"{name}: {reason}" for name, reason in skipped],
        wanted=f"at least one layer whose weight {computing.dtype} kernels take and whose sizes suit a pattern",
        remedy="model.float() where the weights are of another dtype; skip fewer layers",
    )


def _refusal(module: nn.Module, inside_attention: bool, computing: Computing) -> str | None:
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return _IMAGES
    return refusal(module, inside_attention, computing)


@dataclass(frozen=True)
class _Measuring:
    """Measures layers one by one.

    Attributes:
        patterns: What is measured.
        terms: Computing type, token counts, times known.
        footprint: Bytes of all weights.
        skipped: Filled with the weights that cannot be packed, and why.
        group: Inputs that share a scale in widths that are asked for.
    """

    patterns: Sequence[Pattern]
    terms: Terms
    footprint: int
    skipped: list[tuple[str, str]]
    group: int | None = None

    def rows(
        self,
        layers: Mapping[str, Sequence[PrunableWeight]],
        low: Mapping[str, nn.Linear],
        asked: Sequence[Widths],
        progress: Progress | None,
    ) -> Iterator[Raced]:
        """Yield the races of all layers: patterns of those in floats, widths of Linears where they are asked for.

        Args:
            layers: Weights of the layers in floats.
            low: Linears of low bits, which are measured in their own widths too.
            asked: Widths to measure in every Linear.
            progress: See `advise`.
        """
        count = len(layers) + len(low)
        for done, name in enumerate([*layers, *low]):
            if progress is not None:
                progress(done, count, name)
            module = low.get(name) or layers[name][0].module
            if name in layers:
                yield from self.recurrent(layers[name]) if is_recurrent(module) else self.linear(layers[name][0])
            if isinstance(module, nn.Linear):
                yield from low_bit_rows(name, module, asked, self.group, self.terms, self.footprint, self.skipped)
        if progress is not None:
            progress(count, count, "")

    def linear(self, entry: PrunableWeight) -> Iterator[Raced]:
        """Yield the races of a layer with one weight."""
        bias = entry.module._parameters["bias"]
        bias = None if bias is None else bias.detach().float()
        computing, refused = self.terms.computing, dict[str, str]()
        for pattern, pruned in self._pruned(entry, refused):
            packed, because = computing.encode(pruned, pattern)
            if not isinstance(packed, Packed):
                refused[pattern.name] = because
                continue
            options = {"memory": "fast", "footprint": self.footprint, "cache": self.terms.cache}
            options |= {"dtype": computing.dtype, "activations": pruned.dtype}
            choice = choose(packed, bias, self.terms.tokens, **options)
            for count in self.terms.tokens:
                dense, sparse = choice.best(count, sparse=False), choice.best(count, sparse=True)
                assert dense and sparse, choice.times
                yield Raced(entry.layer, (entry.rows, entry.reduction), count, pattern.name, dense, sparse)
        self._say(entry.name, refused)

    def recurrent(self, weights: Sequence[PrunableWeight]) -> Iterator[Raced]:
        """Yield the races of a recurrent layer, all of whose weights are pruned."""
        first, refused = weights[0], dict[str, str]()
        pruned: dict[str, dict[str, tuple[Pattern, Tensor]]] = {}
        for entry in weights:
            for pattern, values in self._pruned(entry, refused):
                pruned.setdefault(pattern.name, {})[entry.attribute] = entry.lay(pattern), values
        fitting = {name: found for name, found in pruned.items() if name not in refused}
        given = first.layer, first.module, fitting, self.terms
        for count in self.terms.tokens:
            try:
                found, unpacked = raced_patterns(*given, (count, 1), self.footprint)
            except KernelError as error:
                self.skipped.append((first.name, error.what))
                break
            refused |= unpacked
            dense = min((one for name, one in found.items() if name not in fitting), key=lambda one: one[1])
            for name in (name for name in fitting if name in found):
                yield Raced(first.layer, (first.rows, first.reduction), count, name, dense, found[name])
        self._say(first.name, refused)

    def _pruned(self, entry: PrunableWeight, refused: dict[str, str]) -> Iterator[tuple[Pattern, Tensor]]:
        """Yield each pattern with the weight (out, in) pruned by magnitude; note in `refused` why one does not fit."""
        dense = entry.reduction_last(entry.parameter.detach()).contiguous()
        if not is_finite(dense):
            raise non_finite("a weight", dense).for_layer(entry.layer)
        for pattern in self.patterns:
            if reason := entry.unfit(pattern):
                refused[pattern.name] = reason
                continue
            try:
                yield pattern, dense * entry.lay(pattern).project(dense, absolute=True)
            except PatternError as error:
                refused[pattern.name] = error.got or error.what

    def _say(self, name: str, refused: dict[str, str]) -> None:
        """Note the patterns that a weight cannot carry, once where all have one reason."""
        if len(refused) == len(self.patterns) and len(set(refused.values())) == 1:
            refused = {"": next(iter(refused.values()))}
        self.skipped.extend(
            (name, reason if not pattern or reason.startswith(f"{pattern}: ") else f"{pattern}: {reason}")
            for pattern, reason in refused.items()
        )
