"""The layers that are compiled with the weights of a file, and how much the file may ask to be measured for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, nn

from twofour import quantization
from twofour.compiler.choose import DEFAULT_TOKENS
from twofour.compiler.choose_recurrent import RecurrentWeights, recurrent_weights
from twofour.compiler.compilation import Compilation, answers_of
from twofour.compiler.computing import Computing
from twofour.compiler.recurrent_kinds import is_recurrent
from twofour.compiler.replaceable import (
    LayerWeight,
    attention_parts,
    is_convolution,
    is_linear,
    layer_weight,
    refusal,
)
from twofour.kernels.conv import Images
from twofour.kernels.nm_matmul import DYNAMIC
from twofour.packing import Packed
from twofour.patterns import Pattern

logger = logging.getLogger("twofour.export")

LARGEST_INPUT = 1 << 28
"""Numbers in the input that a file may ask a layer to be measured on: 1 GB of float32."""

MOST_WORK = 1 << 40
"""Multiply-adds of all that a file may ask to be measured, each called once: some ten seconds of one core, of which
measuring makes minutes. ResNet-50 on 256 images takes that; an 8B Llama at the default token counts two fifths, as its
layers are alike and count once."""

Stored = Packed | Tensor


class Allowance:
    """What a file may still ask to be measured; cases that are alike are measured once, and count once."""

    def __init__(self) -> None:
        self.left = MOST_WORK
        self._seen: set[tuple[int, int, int]] = set()

    def takes(self, numbers: int, cases: Sequence[tuple[int, int, int]]) -> bool:
        """Whether all of `cases` may be measured; then they are taken from what is left.

        Args:
            numbers: In the largest operand of one of them.
            cases: Rows, columns, and tokens or pixels.
        """
        new = {case for case in cases if case not in self._seen}
        work = sum(map(prod, new))
        if numbers > LARGEST_INPUT or work > self.left:
            return False
        self.left -= work
        self._seen |= new
        return True


@dataclass(frozen=True)
class FileLayers:
    """The layers of a model that are compiled with the weights of a file.

    Attributes:
        stored: What the file holds, by every name of the state dict.
        patterns: What weights obey, by their names.
        model: Gives the structure.
        said: How the model of the file was compiled.
        computing: How the compiled layers write their weights.
        allowance: What the file may still ask to be measured.
    """

    stored: Mapping[str, Stored]
    patterns: Mapping[str, Pattern]
    model: nn.Module
    said: Compilation
    computing: Computing
    allowance: Allowance

    def weights(self) -> Iterator[tuple[str, LayerWeight]]:
        """Yield the linear layers, and the convolutions whose images the file knows."""
        for name, module in self._taken():
            if is_linear(module) or (is_convolution(module) and self._measurable(name, module)):
                found = self._layer_weight(name, module)
                images = found.images if found.geometry is None else self.said.images[name]
                ranges = {
                    "quantization": self.said.ranges.get(name, DYNAMIC),
                    "answers": answers_of(self.said.answers.get(name)),
                }
                yield name, replace(found, **ranges, images=images)

    def recurrent(self) -> Iterator[tuple[str, RecurrentWeights]]:
        """Yield the recurrent layers."""
        for name, module in self._taken():
            if not is_recurrent(module):
                continue
            prefix, held = f"{name}." if name else "", module._parameters
            own = {part: self._as_in(self.stored[prefix + part], p) for part, p in held.items() if p is not None}
            given = own, self.computing, self.patterns, self.said.steps.get(name)
            found = recurrent_weights(name, module, *given)
            count, batch = found.steps
            sizes = [(rows, columns, count * batch) for rows, columns in found.problem.shapes]
            if self.allowance.takes(count * batch * max(map(max, sizes)), sizes):
                yield name, found
            else:
                logger.warning("layer `%s`: %d steps of %d in the file are not measured: too many", name, count, batch)

    def counts(self, weights: Mapping[str, LayerWeight]) -> Iterator[tuple[str, int]]:
        """Yield the linear layers whose token count in the example the file knows; older files know none."""
        for name, weight in weights.items():
            found = self.said.counts.get(name)
            if found is None or weight.geometry is not None:
                continue
            size = weight.rows, weight.columns
            if self.allowance.takes(found * max(size), [(*size, found)]):
                yield name, found
            else:
                logger.warning("layer `%s`: %d tokens in the file are not measured: too many", name, found)

    def low_bits_counts(self, fast: nn.Module) -> Iterator[tuple[str, int]]:
        """Yield the token counts that the file knows of layers of low bits."""
        for name in quantization.of(fast):
            module, found = fast.get_submodule(name), self.said.counts.get(name)
            if found is None or not isinstance(module, nn.Linear):
                continue
            size = module.out_features, module.in_features
            if self.allowance.takes(found * max(size), [(*size, found)]):
                yield name, found
            else:
                logger.warning("layer `%s`: %d tokens in the file are not measured: too many", name, found)

    def low_bits_images(self, fast: nn.Module) -> Iterator[tuple[str, Images]]:
        """Yield the images that the file knows of convolutions of low bits."""
        for name in quantization.of(fast):
            module = fast.get_submodule(name)
            if isinstance(module, nn.Conv2d) and self._measurable(name, module):
                yield name, self.said.images[name]

    def _taken(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the layers that can be replaced and were, where the model of the file was compiled."""
        parts = attention_parts(self.model)
        for name, module in self.model.named_modules():
            if name in self.said.kept_dense or not (
                is_linear(module) or is_convolution(module) or is_recurrent(module)
            ):
                continue
            if refusal(module, name in parts, self.computing) is None:
                yield name, module

    def _layer_weight(self, layer: str, module: nn.Linear | nn.Conv1d | nn.Conv2d) -> LayerWeight:
        """Describe a layer with the file's weight."""
        key = f"{layer}.weight".lstrip(".")
        source = self.stored[key]
        bias = self.stored.get(f"{layer}.bias".lstrip("."))
        bias = bias if isinstance(bias, Tensor) else None
        given = self._as_in(source, module.weight), bias, self.computing, self.patterns.get(key), module.weight.dtype
        return replace(layer_weight(layer, module, *given), source=source)  # a copy's id is the next layer's

    def _as_in(self, weight: Stored, parameter: Tensor) -> Stored:
        """Return a dense weight in the model's type, as after loading a state dict.

        Packed it stays where products of the computing type read its whole numbers: a writer whose scales are not the
        largest value by 127 would find others after rounding again.
        """
        if isinstance(weight, Packed):
            as_it_is = weight.header.sparse or (parameter.ndim == 2 and self.computing.keeps(weight))
            return weight if as_it_is else weight.unpack().to(parameter.dtype)
        return weight.to(parameter.dtype) if weight.is_floating_point() else weight

    def _measurable(self, name: str, module: nn.Conv1d | nn.Conv2d) -> bool:
        """Whether a convolution may be measured on the images that the file says."""
        images: Images | None = self.said.images.get(name)
        if images is None:
            return False
        numbers = prod(images) * max(module.in_channels, module.out_channels)
        pixels = prod(images) // prod(module.stride)
        if self.allowance.takes(numbers, [(module.out_channels, prod(module.weight.shape[1:]), pixels)]):
            return True
        logger.warning("layer `%s`: images of %s in the file are not measured: too large", name, images)
        return False


def affordable(counts: Sequence[int], model: nn.Module, allowance: Allowance) -> tuple[int, ...]:
    """Return the token counts of a file that are measured at every layer, the smallest first where not all can be."""
    sizes = {(module.out_features, module.in_features) for module in model.modules() if isinstance(module, nn.Linear)}
    widest = max((max(size) for size in sizes), default=0)
    taken = [n for n in sorted(set(counts)) if allowance.takes(n * widest, [(*size, n) for size in sizes])]
    if left := [count for count in counts if count not in taken]:
        logger.warning("%s tokens in the file are not measured: too many", ", ".join(map(str, left)))
    return tuple(count for count in counts if count in taken) or tuple(DEFAULT_TOKENS)
