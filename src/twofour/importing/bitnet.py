"""BitNet b1.58 as transformers stores it: ternary weights, four rows in a byte, and one scale for a weight.

Of each Linear NAME (out, in) it stores `NAME.weight` uint8 (out / 4, in), whose byte r has the codes of the rows r, r +
out / 4, r + 2 out / 4 and r + 3 out / 4, two bits each from bit 0 on, code = value + 1, and `NAME.weight_scale` of one
value. The layer rounds each token to 8 bits, s = max |x| / 127, and multiplies whole numbers (Ma et al. 2024, "The Era
of 1-bit LLMs", arXiv 2402.17764, section 2; transformers' `integrations.bitnet`). Its `BitLinear` divides by
`weight_scale` and its `AutoBitLinear` multiplies by it: config.json says which of them wrote the file. It takes max |x|
for 1e-5 at least, the layers here for 127 times the smallest normal float32: tokens of smaller numbers, which it rounds
to fewer levels, differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.errors import FormatError, PackingError
from twofour.importing.base import Found, LowBitWeight, Source, malformed, shown, stems
from twofour.layers import Reduction
from twofour.packing import encodings, pack
from twofour.packing.pack import Packed
from twofour.packing.validate import LARGEST_SCALE
from twofour.quantization import Widths

IN_A_BYTE = 4
"""Rows of a weight that one stored row holds."""

SCALE, NORM = "weight_scale", "rms_norm.weight"

WIDTHS = Widths(encodings.TERNARY, encodings.TWOS[0])
"""Ternary weights; inputs in two's complement of 8 bits."""


@dataclass(frozen=True)
class BitNet:
    """`bitnet`."""

    name: str = "bitnet"

    def recognises(self, source: Source) -> bool:
        """See `Format`."""
        return (source.asked == self.name or _says_so(source)) and bool(_layers(source))

    def decode(self, source: Source, axes: Mapping[str, Reduction] | None) -> Found:
        """See `Format`."""
        layers, divides = _layers(source), _divides(source)
        taken = {f"{layer}.{part}" for layer in layers for part in ("weight", SCALE)}
        plain = {name: tensor for name, tensor in source.tensors.items() if name not in taken}
        if norms := [name for name in plain if name.endswith(f".{NORM}") and name[: -len(NORM) - 1] in layers]:
            wanted = "layers that round their inputs as they are: use_rms_norm is false"
            raise malformed(source, norms[0], f"`{norms[0]}`, a norm inside the layer", wanted)
        found = {f"{layer}.weight": _weight(source, layer, divides) for layer in layers}
        notes = [f"{len(found)} ternary weights, whose layers round each token to 8 bits"]
        return Found(plain, {}, tuple(notes), found)


def _layers(source: Source) -> list[str]:
    return [layer for layer in stems(source, SCALE) if _is_bytes(source.tensors.get(f"{layer}.weight"))]


def _is_bytes(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype is torch.uint8


def _says_so(source: Source) -> bool:
    """Tell whether config.json names BitNet: bytes beside a scale are those of others too, such as NVFP4."""
    said = source.config.get("quantization_config")
    return isinstance(said, Mapping) and said.get("quant_method") == "bitnet"


def _divides(source: Source) -> bool:
    """Return whether the layers divide by their scale.

    Raises:
        FormatError: config.json does not say what wrote the file.
    """
    said = source.config.get("quantization_config")
    kind = said.get("linear_class", "bitlinear") if isinstance(said, Mapping) else None
    if not _says_so(source) or kind not in ("bitlinear", "autobitlinear"):
        raise FormatError(
            "a BitNet checkpoint does not say what its scales mean",
            got=f"{source.path}: no config.json with a quantization_config of bitnet",
            wanted='quant_method "bitnet", and linear_class "bitlinear" (which divides by a scale) or "autobitlinear"',
            remedy="read the folder that transformers wrote, with its config.json",
        )
    return kind == "bitlinear"


def _weight(source: Source, layer: str, divides: bool) -> LowBitWeight:
    stored, scale = source.tensors[f"{layer}.weight"], source.tensors[f"{layer}.{SCALE}"]
    if stored.ndim != 2 or not stored.numel():
        raise malformed(source, layer, f"weight {shown(stored)}", "uint8 (out / 4, in)")
    if not isinstance(scale, Tensor) or not scale.is_floating_point() or scale.numel() != 1:
        raise malformed(source, layer, f"{SCALE} {shown(scale)}", "one real number")
    value = scale.double().item()
    least = torch.finfo(torch.float32).tiny
    value = (1 / value if value else torch.inf) if divides else value
    if not least <= value <= LARGEST_SCALE:
        raise malformed(source, layer, f"{SCALE} {scale.item()}", "a positive finite scale")
    codes = torch.cat([stored >> 2 * place & 3 for place in range(IN_A_BYTE)])
    return LowBitWeight(_packed(source, layer, codes, value), WIDTHS)


def _packed(source: Source, layer: str, codes: Tensor, scale: float) -> Packed:
    try:
        packed = pack(codes.to(torch.int16) - 1, "dense", encodings.TERNARY5.name)
    except PackingError as error:
        raise malformed(source, layer, "a code of 3", "codes 0, 1 and 2") from error
    scales = torch.full((len(codes), 1), scale, dtype=torch.float32, device="cpu")
    return Packed(packed.header, packed.values, packed.indices, scales)
