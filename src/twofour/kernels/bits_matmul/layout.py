"""The orders of bytes in which kernels read weights of codes (bits.h), made from plain codes and turned back."""

from __future__ import annotations

import struct
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.files import bytes_of
from twofour.kernels.bits_matmul.codes import TWO_OF_FOUR, BitWeight, Levels
from twofour.kernels.bits_matmul.lookup_layouts import Lookups, Tables, padded_codes
from twofour.native import pages
from twofour.packing import HEADER_BYTES, has_zeros, layout_head, layout_header
from twofour.patterns import parse
from twofour.shapes import UInt8

_HEAD = struct.Struct("<6i40x")  # BitsHead: bits, alpha, beta of what is stored; those of the weight's own codes


def panel_of(layout: str) -> int:
    """Return the outputs of a panel of a layout: kBitsLayouts of bits.h."""
    return native.extension().bits_panels[layout]


def group_limits() -> tuple[int, int, int]:
    """Return what a group of inputs is a multiple of, the most inputs of one, and of one scale for all (bits.h)."""
    return native.extension().bits_groups


class Layout(Protocol):
    """One order: how codes are stored, and where."""

    def stored(self, levels: Levels) -> tuple[int, int, int]:
        """Return bits, alpha and beta of a stored code: value = alpha * stored + beta."""
        ...

    def to_bytes(self, codes: UInt8[Tensor, "out in"], levels: Levels) -> Tensor:
        """Return codes of whole panels of outputs as they are stored: uint8, flat."""
        ...

    def to_codes(self, data: Tensor, out: int, columns: int, levels: Levels) -> Tensor:
        """Return the inverse of `to_bytes`: uint8 (out, columns)."""
        ...


class Bytes:
    """Bytes of two's complement, [panel][inputs / 4][64 outputs][4]: the values themselves where they fit."""

    def stored(self, levels: Levels) -> tuple[int, int, int]:
        """See `Layout.stored`: codes less 128 where values need nine bits."""
        if levels.beta >= -128 and levels.alpha * levels.most + levels.beta <= 127:
            return 8, 1, 0
        return 8, levels.alpha, levels.beta + 128 * levels.alpha

    def to_bytes(self, codes: Tensor, levels: Levels) -> Tensor:
        """See `Layout.to_bytes`."""
        _, alpha, beta = self.stored(levels)
        values = (codes.short() * levels.alpha + levels.beta - beta) // alpha
        padded = padded_codes(values.to(torch.int8).view(torch.uint8), 4)
        return padded.view(-1, panel_of("bits_bytes"), padded.shape[1] // 4, 4).transpose(1, 2).flatten()

    def to_codes(self, data: Tensor, out: int, columns: int, levels: Levels) -> Tensor:
        """See `Layout.to_codes`."""
        _, alpha, beta = self.stored(levels)
        fours = data.view(-1, -(-columns // 4), panel_of("bits_bytes"), 4).transpose(1, 2)
        values = fours.reshape(out, -1)[:, :columns].view(torch.int8)
        return ((values.short() * alpha + beta - levels.beta) // levels.alpha).to(torch.uint8)


class PackedCodes:
    """Codes of 1, 2, 4 or 8 bits: as `Bytes`, but a byte holds a code of each of 8, 4 or 2 fours of inputs."""

    def stored(self, levels: Levels) -> tuple[int, int, int]:
        """See `Layout.stored`: the codes themselves; three bits take four, five to seven take eight."""
        return next(bits for bits in (1, 2, 4, 8) if bits >= levels.bits), levels.alpha, levels.beta

    def to_bytes(self, codes: Tensor, levels: Levels) -> Tensor:
        """See `Layout.to_bytes`."""
        bits = self.stored(levels)[0]
        per = 8 // bits
        padded = padded_codes(codes, 4 * per)
        fours = padded.view(-1, panel_of("bits_packed"), padded.shape[1] // (4 * per), per, 4)
        packed = sum(fours[..., i, :] << (i * bits) for i in range(per))
        assert isinstance(packed, Tensor)
        return packed.transpose(1, 2).flatten()

    def to_codes(self, data: Tensor, out: int, columns: int, levels: Levels) -> Tensor:
        """See `Layout.to_codes`."""
        bits = self.stored(levels)[0]
        per = 8 // bits
        packed = data.view(-1, -(-columns // (4 * per)), panel_of("bits_packed"), 4).transpose(1, 2)
        fours = torch.stack([packed >> (i * bits) & ((1 << bits) - 1) for i in range(per)], -2)
        return fours.reshape(out, -1)[:, :columns].contiguous()


class Planes:
    """Planes of bits, [panel][plane][inputs / 64][32 outputs] words of 64 bits."""

    def stored(self, levels: Levels) -> tuple[int, int, int]:
        """See `Layout.stored`: the codes themselves."""
        return levels.bits, levels.alpha, levels.beta

    def to_bytes(self, codes: Tensor, levels: Levels) -> Tensor:
        """See `Layout.to_bytes`."""
        padded = padded_codes(codes, 64).numpy()
        planes = [np.packbits(padded >> p & 1, axis=1, bitorder="little").view(np.uint64) for p in range(levels.bits)]
        outputs = np.stack(planes, 1).reshape(-1, panel_of("bits_planes"), levels.bits, padded.shape[1] // 64)
        words = outputs.transpose(0, 2, 3, 1)
        return torch.as_tensor(np.ascontiguousarray(words).view(np.uint8).reshape(-1), dtype=torch.uint8, device="cpu")

    def to_codes(self, data: Tensor, out: int, columns: int, levels: Levels) -> Tensor:
        """See `Layout.to_codes`."""
        words = data.numpy().view(np.uint64).reshape(-1, levels.bits, -(-columns // 64), panel_of("bits_planes"))
        planes = np.ascontiguousarray(words.transpose(0, 3, 1, 2)).view(np.uint8).reshape(out, levels.bits, -1)
        ones = np.unpackbits(planes, axis=2, bitorder="little")[:, :, :columns]
        codes = (ones << np.arange(levels.bits, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
        return torch.as_tensor(codes, dtype=torch.uint8, device="cpu")


KEPT_INPUTS = 32
"""Inputs of a unit of the layouts of 2:4 weights; outputs stand in halves of 16 (layouts/octets.h)."""

_FOURS = torch.tensor([4, 8, 12, 9, 13, 14, 4, 4], dtype=torch.uint8, device="cpu")
"""Code of three bits -> which two of a four are kept, first + 4 * second: 01, 02, 03, 12, 13, 23."""


class KeptBytes:
    """The two values of each four that a 2:4 weight keeps, bytes, and where they stand, two bits each: see bits.h.

    [panel of 32 outputs][inputs / 32][2 halves of outputs]: a dword of indices for each of 16 outputs, byte b those of
    value b of four octets of inputs; then for each octet the four values of each output.
    """

    def stored(self, levels: Levels) -> tuple[int, int, int]:
        """See `Layout.stored`: the values themselves."""
        return 8, 1, 0

    def to_bytes(self, codes: Tensor, levels: Levels) -> Tensor:
        """See `Layout.to_bytes`."""
        values, places = (part.view(-1, 2, 16, *part.shape[1:]) for part in _kept(codes, levels))
        units = values.shape[3] // 16
        of_octets = places.view(-1, 2, 16, units, 4, 4)  # panel, half, output, unit, octet, value
        indices = _joined([of_octets[..., o, :] << 2 * o for o in range(4)])
        kept = values.view(-1, 2, 16, units, 4, 4).permute(0, 3, 1, 4, 2, 5)  # panel, unit, half, octet, output, value
        return torch.cat([indices.permute(0, 3, 1, 2, 4).unsqueeze(3), kept], 3).flatten()

    def to_codes(self, data: Tensor, out: int, columns: int, levels: Levels) -> Tensor:
        """See `Layout.to_codes`."""
        parts = data.view(-1, -(-columns // KEPT_INPUTS), 2, 5, 16, 4)
        values = parts[:, :, :, 1:].permute(0, 2, 4, 1, 3, 5).reshape(out, -1)
        indices = parts[:, :, :, 0].permute(0, 2, 3, 1, 4).reshape(out, -1, 4)
        places = torch.stack([indices >> 2 * o & 3 for o in range(4)], 2).view(out, -1)
        return _of_kept(values, places, levels, columns)


class KeptHalves:
    """The same of values of up to 4 bits, in half bytes, and three bits for the two that a four keeps: see bits.h.

    [panel of 64 outputs][inputs / 32]: 24 bits of codes of each output; then for each 16 outputs and 16 inputs a dword
    an output, of its eight values those of the first octet in the lower halves of bytes.
    """

    def stored(self, levels: Levels) -> tuple[int, int, int]:
        """See `Layout.stored`: the values themselves."""
        return 4, 1, 0

    def to_bytes(self, codes: Tensor, levels: Levels) -> Tensor:
        """See `Layout.to_bytes`."""
        values, places = _kept(codes, levels)
        pairs = places.view(len(places), -1, 8, 2)  # unit, four, value
        of_fours = (pairs[..., 0] + (pairs[..., 1] << 2)).long()
        codes_of = torch.empty(16, dtype=torch.int32, device="cpu")
        codes_of[_FOURS[:6].long()] = torch.arange(6, dtype=torch.int32, device="cpu")
        bits = _joined([codes_of[of_fours[..., f]] << 3 * f for f in range(8)])
        three = torch.stack([bits >> 8 * b & 255 for b in range(3)], -1).to(torch.uint8)
        octets = (values & 15).view(-1, 4, 16, bits.shape[1], 2, 2, 4)  # panel, outputs, unit, octets, value
        halves = (octets[..., 0, :] | octets[..., 1, :] << 4).permute(0, 3, 1, 4, 2, 5)
        indices = three.view(-1, 64, *three.shape[1:]).transpose(1, 2)
        return torch.cat([indices.flatten(2), halves.flatten(2)], 2).flatten()

    def to_codes(self, data: Tensor, out: int, columns: int, levels: Levels) -> Tensor:
        """See `Layout.to_codes`."""
        units = -(-columns // KEPT_INPUTS)
        parts = data.view(out // 64, units, -1)
        three = parts[..., : 3 * 64].reshape(-1, units, 64, 3).transpose(1, 2).reshape(out, units, 3).int()
        bits = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16
        fours = torch.stack([_FOURS[(bits >> 3 * f & 7).long()] for f in range(8)], -1)
        places = torch.stack([fours & 3, fours >> 2], -1).view(out, -1)
        halves = parts[..., 3 * 64 :].reshape(-1, units, 4, 2, 16, 4).permute(0, 2, 4, 1, 3, 5)
        octets = torch.stack([halves & 15, halves >> 4], -2).reshape(out, -1).view(torch.int8)
        return _of_kept(((octets ^ 8) - 8).view(torch.uint8), places, levels, columns)


def _kept(codes: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
    """Return the two values of each four of a 2:4 weight, two's complement, and their places: uint8 (out, inputs / 2).

    Inputs are filled up to whole units, with values of zero.
    """
    values = padded_codes((codes.short() + levels.beta).to(torch.int8), KEPT_INPUTS)
    keep = parse(TWO_OF_FOUR).project(values.float(), absolute=True)
    places = keep.view(-1, 4).nonzero()[:, 1].to(torch.uint8).view(len(values), -1)
    return values[keep].view(len(values), -1).view(torch.uint8), places


def _of_kept(values: Tensor, places: Tensor, levels: Levels, columns: int) -> Tensor:
    """Return the codes that `_kept` was given: uint8 (out, columns)."""
    fours = torch.zeros(values.numel() // 2, 4, dtype=torch.int8, device="cpu")
    fours.scatter_(1, places.reshape(-1, 2).long(), values.reshape(-1, 2).view(torch.int8))
    found = fours.view(len(values), -1)[:, :columns].short() - levels.beta
    return found.to(torch.uint8)


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the bits of all parts."""
    found = parts[0]
    for part in parts[1:]:
        found = found | part
    return found


GROUPS = "bits_groups"
"""Codes as `PackedCodes` has them, [panel][group]: scales, sums of values, with zero points levels of code 0, codes."""

LARGEST_SUM = (1 << 15) - 1
"""Of the values of a group, which have 16 bits."""

LAYOUTS: dict[str, Layout] = {
    "bits_bytes": Bytes(),
    "bits_packed": PackedCodes(),
    "bits_planes": Planes(),
    "bits_tables": Tables(6, 4),
    "bits_lookups": Lookups(),
    "bits_fours": Tables(4, 2),
    GROUPS: PackedCodes(),
    "bits_2x4_bytes": KeptBytes(),
    "bits_2x4_packed": KeptHalves(),
}
"""Name of a layout -> its order."""

OF_2X4 = ("bits_2x4_bytes", "bits_2x4_packed")
"""Those of 2:4 weights."""


def to_layout(weight: BitWeight, name: str, sums: Tensor | None = None, behind: int = 0) -> Tensor:
    """Return a weight in a layout behind its 64-byte header: uint8.

    Args:
        weight: Codes and scales.
        name: Of the layout.
        sums: int32 (out,), of the values of a row, where some of its codes stand for no value.
        behind: Bytes to keep free behind the layout; they are zero.

    Raises:
        KernelError: Sums or zero points of groups exceed the bits that `GROUPS` has for them; the layout is of 2:4
            weights, and the weight is none.
    """
    if name in OF_2X4 and weight.pattern != TWO_OF_FOUR:
        raise KernelError(
            f"a weight of codes does not fit the layout {name!r}",
            got="a four of inputs with more than two values that are not zero",
            wanted="2:4 of the values, levels one apart that bytes hold",
            remedy="take a dense row; `refuses_levels` of a row says what it takes",
        )
    layout, (out, columns) = LAYOUTS[name], weight.codes.shape
    head, runs = layout.stored(weight.levels), (weight.group, weight.shifted)
    panel, scales, at, weights, end = native.extension().bits_places(name, out, columns, head[0], *runs)
    padded = -(-out // panel) * panel
    buffer = pages.empty(HEADER_BYTES + end + behind)
    buffer[: HEADER_BYTES + weights] = 0
    buffer[HEADER_BYTES + end :] = 0
    pattern = TWO_OF_FOUR if name in OF_2X4 else "dense"
    first = layout_header(pattern, "bits", name, out, columns, group=weight.group, zeros=weight.shifted)
    first += _HEAD.pack(*head, weight.levels.bits, weight.levels.alpha, weight.levels.beta)
    buffer[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    body = buffer[HEADER_BYTES:]
    codes = torch.nn.functional.pad(weight.codes, (0, 0, 0, padded - out))
    if name == GROUPS:
        body[weights:end] = _groups(weight, layout.to_bytes(codes, weight.levels), padded)
        return buffer
    body[scales : scales + 4 * out] = bytes_of(weight.scales)
    of_rows = weight.values().sum(1, dtype=torch.int32) if sums is None else sums
    body[at : at + 4 * out] = bytes_of(of_rows)
    body[weights:end] = layout.to_bytes(codes, weight.levels)
    return buffer


def from_layout(buffer: Tensor) -> BitWeight:
    """Return the weight that `to_layout` was given."""
    head = layout_head(buffer)
    runs = struct.unpack_from("<H", head, 6)[0] & 0x7FFF, has_zeros(head)
    name, (out, columns) = head[32:48].rstrip(b"\0").decode("ascii"), struct.unpack("<2q", head[48:])
    body = buffer[HEADER_BYTES:]
    bits, _, _, *own = _HEAD.unpack(body[: _HEAD.size].numpy().tobytes())
    panel, scales, _, weights, end = native.extension().bits_places(name, out, columns, bits, *runs)
    levels = Levels(*own)
    if name == GROUPS:
        return _of_groups(body[weights:end], levels, (out, columns), runs)
    codes = LAYOUTS[name].to_codes(body[weights:end], -(-out // panel) * panel, columns, levels)
    return BitWeight(codes[:out].contiguous(), levels, body[scales : scales + 4 * out].clone().view(torch.float32))


def _groups(weight: BitWeight, codes: Tensor, padded: int) -> Tensor:
    """Return panels of groups, flat, from the codes of whole panels (bits.h, GroupShape)."""
    group, values = weight.group or weight.shape[1], weight.values()
    groups, panels = weight.shape[1] // group, padded // panel_of(GROUPS)
    size = (panels, panel_of(GROUPS), -1)

    def of_groups(numbers: Tensor) -> Tensor:
        whole = torch.nn.functional.pad(numbers.reshape(len(values), groups), (0, 0, 0, padded - len(values)))
        return whole.view(size).transpose(1, 2).contiguous().view(torch.uint8)

    sums = values.view(len(values), groups, group).sum(2, dtype=torch.int32)
    if weight.group:
        sums = _narrow(sums, torch.int16, "sums of the values of groups", "smaller groups")
    parts = [of_groups(weight.scales), of_groups(sums)]
    if weight.zeros is not None:
        of_zero = weight.levels.beta - weight.zeros.int()
        parts.append(
            of_groups(_narrow(of_zero, torch.int8, "levels of code 0", "zero points nearer to the least level"))
        )
    return torch.cat([*parts, codes.view(panels, groups, -1)], 2).flatten()


def _narrow(numbers: Tensor, dtype: torch.dtype, what: str, remedy: str) -> Tensor:
    """Return whole numbers in a dtype of fewer bits.

    Raises:
        KernelError: It does not hold them.
    """
    bounds, (least, most) = torch.iinfo(dtype), (int(end) for end in numbers.aminmax())
    if not bounds.min <= least <= most <= bounds.max:
        raise KernelError(
            f"a weight of codes does not fit the layout {GROUPS!r}",
            got=f"{what} from {least} to {most}",
            wanted=f"{bounds.min} to {bounds.max}",
            remedy=f"{remedy}, or fewer bits; `refuses_levels` of a row says what it takes",
        )
    return numbers.to(dtype)


def _of_groups(data: Tensor, levels: Levels, shape: tuple[int, int], runs: tuple[int, bool]) -> BitWeight:
    """Return the weight that `_groups` was given."""
    (out, columns), (group, shifted) = shape, runs
    panel = panel_of(GROUPS)
    panels, groups = -(-out // panel), columns // (group or columns)
    parts, at = data.view(panels, groups, -1), panel * (4 + (2 if group else 4))

    def of_rows(numbers: Tensor) -> Tensor:
        found = numbers.transpose(1, 2).reshape(-1, groups)[:out].contiguous()
        return found if group else found.flatten()

    codes = LAYOUTS[GROUPS].to_codes(parts[..., at + panel * shifted :].reshape(-1), panels * panel, columns, levels)
    zeros = (
        of_rows((levels.beta - parts[..., at : at + panel].contiguous().view(torch.int8).int()).to(torch.int8))
        if shifted
        else None
    )
    return BitWeight(
        codes[:out].contiguous(), levels, of_rows(parts[..., : 4 * panel].contiguous().view(torch.float32)), zeros
    )
