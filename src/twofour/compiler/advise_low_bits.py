"""What low bits would bring in a Linear: the best products of codes beside the best dense ones, in floats and int8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour import quantization
from twofour.compiler.advice import Raced
from twofour.compiler.choose import Choice, choose
from twofour.compiler.terms import Terms
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import BitWeight
from twofour.kernels.problem import Problem
from twofour.layers import matches
from twofour.packing import pack
from twofour.packing.encodings import INT8
from twofour.quantization import LowBits, Widths


def low_bit_linears(model: nn.Module, skip: str | Sequence[str]) -> dict[str, nn.Linear]:
    """Return the Linears of low bits of a model that `skip` does not name."""
    return {name: module for name, module in _of_low_bits(model, skip).items() if isinstance(module, nn.Linear)}


def low_bit_images(model: nn.Module, skip: str | Sequence[str]) -> set[str]:
    """Return the names of the weights of the convolutions of low bits that `skip` does not name."""
    found = _of_low_bits(model, skip)
    return {f"{name}.weight".lstrip(".") for name, module in found.items() if not isinstance(module, nn.Linear)}


def _of_low_bits(model: nn.Module, skip: str | Sequence[str]) -> dict[str, nn.Module]:
    globs = [skip] if isinstance(skip, str) else skip
    found = {name: model.get_submodule(name) for name in quantization.of(model)}
    return {name: module for name, module in found.items() if not any(matches(glob, name) for glob in globs)}


def own_widths(module: nn.Module, asked: Sequence[Widths]) -> tuple[Widths, ...]:
    """Return a layer's own widths first, then those that were asked for."""
    held = quantization.held_by(module)
    return tuple(dict.fromkeys((*(() if held is None else (held.widths,)), *asked)))


def low_bit_rows(
    name: str,
    module: nn.Linear,
    widths: Sequence[Widths],
    terms: Terms,
    footprint: int,
    skipped: list[tuple[str, str]],
) -> Iterator[Raced]:
    """Yield a race for dense int8 and for each width, at each token count; what has no kernel goes to `skipped`.

    The weight is rounded anew: what counts for time are the bits of its codes.

    Args:
        name: Of the layer.
        module: The layer, in floats or low bits.
        widths: What is measured.
        terms: Computing type of the dense product that is the base of every ratio, token counts, times known.
        footprint: Bytes of all weights.
        skipped: Filled with widths that no kernel runs here.
    """
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach().float()
    options: dict[str, Any] = {"memory": "fast", "footprint": footprint, "cache": terms.cache}
    options |= {"activations": weight.dtype}
    dense = choose(weight, bias, terms.tokens, dtype=terms.computing.dtype, **options)
    shape = (weight.shape[0], weight.shape[1])
    others: dict[str, tuple[Tensor | BitWeight, dict[str, Any]]] = {INT8.name: (weight, {"dtype": INT8.name})}
    for one in widths:
        given: dict[str, Any] = {"dtype": one.name, "problem": Problem(len(weight), quantization=one.range())}
        others[one.name] = (_codes(weight, one, quantization.held_by(module)), given)
    for what, (held, given) in others.items():
        try:
            choice = choose(held, bias, terms.tokens, **options, **given)
        except KernelError as error:
            skipped.append((f"{name}.weight".lstrip("."), f"{what}: {error.what}"))
            continue
        for count in terms.tokens:
            yield Raced(name, shape, count, what, _fastest(dense, count), _fastest(choice, count))


def _fastest(choice: Choice, count: int) -> tuple[str, float]:
    return min(choice.times[count].items(), key=lambda one: one[1])


def _codes(weight: Tensor, widths: Widths, held: LowBits | None) -> BitWeight:
    """Return a weight in codes, in the groups and with the zero points of its layer where the widths are its own."""
    encoding = widths.weights
    group, shifted = (held.group, held.shifted) if held is not None and held.widths == widths else (0, False)
    packed = pack(weight.float(), "dense", encoding.name, group=group or None, symmetric=not shifted)
    assert packed.scales is not None
    codes = encoding.read_codes(packed.values, weight.shape[1])
    size = (len(weight), -1) if group else (len(weight),)
    zeros = None if packed.zeros is None else packed.zeros.view(size).to(torch.int8)
    return BitWeight(codes, widths.levels, packed.scales.view(size).to(torch.float32), zeros)
