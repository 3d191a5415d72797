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
from twofour.kernels.bits_matmul.codes import BitWeight, Levels
from twofour.native import pages
from twofour.packing import HEADER_BYTES, has_zeros, layout_head, layout_header
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
        padded = _padded(values.to(torch.int8).view(torch.uint8), 4)
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
        padded = _padded(codes, 4 * per)
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
        padded = _padded(codes, 64).numpy()
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


class Tables:
    """Some bits of a plane in a byte, [panel][plane][inputs / some][vectors][32][2 halves of a vector's outputs]."""

    def __init__(self, inputs: int, vectors: int) -> None:
        self.inputs, self.vectors = inputs, vectors

    def stored(self, levels: Levels) -> tuple[int, int, int]:
        """See `Layout.stored`: the codes themselves."""
        return levels.bits, levels.alpha, levels.beta

    def to_bytes(self, codes: Tensor, levels: Levels) -> Tensor:
        """See `Layout.to_bytes`."""
        some = _padded(codes, self.inputs).view(len(codes), -1, self.inputs)
        planes = [sum((some[..., i] >> p & 1) << i for i in range(self.inputs)) for p in range(levels.bits)]
        outputs = torch.stack([plane for plane in planes if isinstance(plane, Tensor)], 1)
        return outputs.view(-1, self.vectors, 2, 32, *outputs.shape[1:]).permute(0, 4, 5, 1, 3, 2).flatten()

    def to_codes(self, data: Tensor, out: int, columns: int, levels: Levels) -> Tensor:
        """See `Layout.to_codes`."""
        order = data.view(-1, levels.bits, -(-columns // self.inputs), self.vectors, 32, 2)
        planes = order.permute(0, 3, 5, 4, 1, 2).reshape(out, levels.bits, -1)
        ones = torch.stack([planes >> i & 1 for i in range(self.inputs)], -1).flatten(2)[:, :, :columns]
        shifts = torch.arange(levels.bits, dtype=torch.uint8, device="cpu")[:, None]
        return (ones << shifts).sum(1, dtype=torch.uint8)


GROUPS = "bits_groups"
"""Codes as `PackedCodes` has them, [panel][group]: scales, sums of values, with zero points levels of code 0, codes."""

LARGEST_SUM = (1 << 15) - 1
"""Of the values of a group, which have 16 bits."""

LAYOUTS: dict[str, Layout] = {
    "bits_bytes": Bytes(),
    "bits_packed": PackedCodes(),
    "bits_planes": Planes(),
    "bits_tables": Tables(6, 4),
    "bits_lookups": Tables(6, 1),
    "bits_fours": Tables(4, 2),
    GROUPS: PackedCodes(),
}
"""Name of a layout -> its order."""


def to_layout(weight: BitWeight, name: str, sums: Tensor | None = None, behind: int = 0) -> Tensor:
    """Return a weight in a layout behind its 64-byte header: uint8.

    Args:
        weight: Codes and scales.
        name: Of the layout.
        sums: int32 (out,), of the values of a row, where some of its codes stand for no value.
        behind: Bytes to keep free behind the layout; they are zero.

    Raises:
        KernelError: Sums or zero points of groups exceed the bits that `GROUPS` has for them.
    """
    layout, (out, columns) = LAYOUTS[name], weight.codes.shape
    head, runs = layout.stored(weight.levels), (weight.group, weight.shifted)
    panel, scales, at, weights, end = native.extension().bits_places(name, out, columns, head[0], *runs)
    padded = -(-out // panel) * panel
    buffer = pages.empty(HEADER_BYTES + end + behind)
    buffer[: HEADER_BYTES + weights] = 0
    buffer[HEADER_BYTES + end :] = 0
    first = layout_header("dense", "bits", name, out, columns, group=weight.group, zeros=weight.shifted)
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


def _padded(codes: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % multiple)).contiguous()
