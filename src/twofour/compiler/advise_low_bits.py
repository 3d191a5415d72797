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
from twofour.errors import CompileError, KernelError
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


def require_group(group: int | None, dtype: str, low: bool) -> int | None:
    """Return the inputs that share a scale in a Linear's own `dtype`, None where `group` is of low bits alone.

    Raises:
        CompileError: It is no number of inputs.
    """
    if group is None or not low:
        return group
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CompileError(
            "the group of low bits is no number of inputs",
            got=repr(group),
            wanted="how many inputs share a scale, a divisor of them all, such as 32, 64 or 128",
            remedy="pass group=64, or leave it out for one scale of each output",
        )
    return group if dtype == "int4" else None


def low_bit_rows(
    name: str,
    module: nn.Linear,
    widths: Sequence[Widths],
    group: int | None,
    terms: Terms,
    footprint: int,
    skipped: list[tuple[str, str]],
) -> Iterator[Raced]:
    """Yield a race for dense int8 and for each width, at each token count; what has no kernel goes to `skipped`.

    None where no width is asked for and the layer has none of its own. The weight is rounded anew: what counts for time
    are the bits of its codes.

    Args:
        name: Of the layer.
        module: The layer, in floats or low bits.
        widths: What is measured besides the layer's own.
        group: Inputs that share a scale in them, None: all of an output.
        terms: Computing type of the dense product that is the base of every ratio, token counts, times known.
        footprint: Bytes of all weights.
        skipped: Filled with widths that no kernel runs here.
    """
    asked = _asked(widths, group, quantization.held_by(module))
    if not asked:
        return
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach().float()
    options: dict[str, Any] = {"memory": "fast", "footprint": footprint, "cache": terms.cache}
    options |= {"activations": weight.dtype}
    dense = choose(weight, bias, terms.tokens, dtype=terms.computing.dtype, **options)
    shape = (weight.shape[0], weight.shape[1])
    found: list[tuple[str, Tensor | BitWeight, dict[str, Any], bool]] = [
        (INT8.name, weight, {"dtype": INT8.name}, False)
    ]
    for (one, size, shifted), own in asked.items():
        what = f"{one.name}{f' g{size}' if size else ''}{' zeros' if shifted else ''}"
        if size and shape[1] % size:
            skipped.append((f"{name}.weight".lstrip("."), f"{what}: {size} does not divide its {shape[1]} inputs"))
            continue
        given: dict[str, Any] = {"dtype": one.name, "problem": Problem(len(weight), quantization=one.range())}
        found.append((what, _codes(weight, one, size, shifted), given, own))
    for what, codes, given, own in found:
        try:
            choice = choose(codes, bias, terms.tokens, **options, **given)
        except KernelError as error:
            skipped.append((f"{name}.weight".lstrip("."), f"{what}: {error.what}"))
            continue
        for count in terms.tokens:
            yield Raced(name, shape, count, what, _fastest(dense, count), _fastest(choice, count), own)


def _asked(widths: Sequence[Widths], group: int | None, held: LowBits | None) -> dict[tuple[Widths, int, bool], bool]:
    """Return widths, groups and whether there are zero points, each once, and whether these are the layer's own."""
    own = {} if held is None else {(held.widths, held.group, held.shifted): True}
    return own | {key: key in own for key in ((one, group or 0, False) for one in widths)}


def _fastest(choice: Choice, count: int) -> tuple[str, float]:
    return min(choice.times[count].items(), key=lambda one: one[1])


def _codes(weight: Tensor, widths: Widths, group: int, shifted: bool) -> BitWeight:
    """Return a weight in codes, in groups of so many inputs, 0 for none, and with zero points or without."""
    encoding = widths.weights
    packed = pack(weight.float(), "dense", encoding.name, group=group or None, symmetric=not shifted)
    assert packed.scales is not None
    codes = encoding.read_codes(packed.values, weight.shape[1])
    size = (len(weight), -1) if group else (len(weight),)
    zeros = None if packed.zeros is None else packed.zeros.view(size).to(torch.int8)
    return BitWeight(codes, widths.levels, packed.scales.view(size).to(torch.float32), zeros)
