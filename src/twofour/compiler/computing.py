"""The computing type of a compiled model, and how its weights are written for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twofour.errors import CompileError, PackingError
from twofour.kernels import rows
from twofour.kernels.base import Kernel
from twofour.packing import Packed, dense_of, encodings, has_form, pack, packed_rule, rewrite
from twofour.packing.encodings import GROUPS
from twofour.patterns import DENSE, Pattern
from twofour.patterns.base import Conformity, is_finite, non_finite

REAL = (torch.float32, torch.bfloat16)
"""dtypes of model weights that are read on a CPU."""

GPU_REAL = (*REAL, torch.float16)

_OTHER_NAMES = {"half": "bfloat16", "bfloat": "bfloat16"}


def dtype_name(dtype: Any) -> Any:
    """Return the name of one of torch's dtypes; anything else as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def nearest_dtype(given: object) -> str:
    """Return the computing type that `given` comes nearest to: of as many bits, else float32."""
    text = str(dtype_name(given)).lower()
    if text in _OTHER_NAMES:
        return _OTHER_NAMES[text]
    bits = re.search(r"\d+", text)
    return {"4": "int4", "8": "int8", "16": "bfloat16"}.get(bits.group() if bits else "", "float32")


def _nearest_group(given: object) -> int:
    try:
        number = int(given)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return 64
    return min(GROUPS, key=lambda group: abs(group - number))


def computing_types(device: str) -> tuple[str, ...]:
    """Return the computing types of the products on a device, whether or not a row of them runs here."""
    there = {row.dtype for row in rows() if row.device == device}
    return tuple(encoding.name for encoding in encodings.known() if encoding.name in there)


@dataclass(frozen=True)
class Computing:
    """The computing type of a compiled model, and how its weights are written for it.

    Attributes:
        dtype: Computing type, one of `computing_types`.
        group: Inputs that share a scale in int4.
        symmetric: Whether int4 has no zero points.
        device: "cpu" or "cuda": where the model is, which decides what types there are.
    """

    dtype: str = "float32"
    group: int = 64
    symmetric: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not isinstance(self.symmetric, bool):
            raise CompileError(
                "`symmetric` is neither True nor False",
                got=repr(self.symmetric),
                wanted="True, or False for zero points",
                remedy="leave it out for True",
            )
        known = computing_types(self.device)
        for what, given, allowed in (("dtype", self.dtype, known), ("group", self.group, GROUPS)):
            if given not in allowed:
                near = nearest_dtype(given) if what == "dtype" else _nearest_group(given)
                wanted = " or ".join(map(repr, allowed))
                on_gpu = what == "dtype" and given in computing_types("cuda")
                elsewhere = f"; {given!r} is for models on an NVIDIA GPU" if on_gpu else ""
                raise CompileError(
                    f"the {what} is not known",
                    got=repr(given),
                    wanted=wanted,
                    remedy=f"pass {what}={near!r}{elsewhere}",
                )

    @classmethod
    def of(cls, dtype: str, device: str = "cpu", **options: Any) -> Computing:
        """Return the computing type with the options that are not None.

        Raises:
            CompileError: One is unknown, or is given although the computing type has nothing of the kind.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if given and dtype in computing_types(device) and not encodings.get(dtype).groups:
            raise CompileError(
                f"`{next(iter(given))}` means nothing in {dtype}",
                got=", ".join(f"{name}={value!r}" for name, value in given.items()) + f", dtype={dtype!r}",
                wanted='these options with dtype="int4" alone: int8 has one scale per output channel, floats have none',
                remedy=f'leave {" and ".join(given)} out, or pass dtype="int4"; advise takes a group for low bits with '
                'widths=["w4a8"]',
            )
        return cls(dtype, device=device, **given)

    def takes(self, weight: Tensor) -> bool:
        """Tell whether a model weight of this dtype can be written so."""
        if self.device == "cuda":
            return weight.dtype in GPU_REAL
        return weight.dtype in REAL and 8 * weight.itemsize >= self.packed.bits  # a kernel does not widen its inputs

    @property
    def packed(self) -> encodings.Encoding:
        """How packed values are written."""
        own = encodings.get(self.dtype)
        return own if own.packed_as is None else encodings.get(own.packed_as)

    @property
    def stored(self) -> str:
        """Name of `packed`."""
        return self.packed.name

    def bytes_of(self, rows: int, columns: int) -> float:
        """Return the bytes of a dense weight of this size in this type, scales left out."""
        return rows * columns * encodings.get(self.dtype).bits / 8

    @property
    def dense_stored(self) -> str:
        """Name of the encoding in which a file holds a weight that runs dense: int4 and float8 as floats."""
        if self.device == "cpu" and has_form(DENSE, self.stored):
            return self.stored
        return "float32" if self.packed.scaled else self.stored

    @property
    def forms(self) -> tuple[Pattern, ...]:
        """Patterns whose packed form the sparse kernels of this computing type read, whether or not they run here."""
        return tuple(form for form in dict.fromkeys(row.form for row in self._sparse_rows) if form is not None)

    @property
    def _sparse_rows(self) -> list[Kernel]:
        return [row for row in rows() if row.sparse and (row.device, row.dtype) == (self.device, self.dtype)]

    def form_of(self, pattern: Pattern) -> Pattern | None:
        """Return the form that a weight of a pattern is written in: its own where kernels take it, else of `forms`.

        Of several of `forms` it is the sparsest; None where there is none.
        """
        own = packed_rule(pattern)
        if any(row.takes(own, self.packed) for row in self._sparse_rows):
            return own
        fitting = [form for form in self.forms if pattern.within(form)]
        return min(fitting, key=lambda form: form.density, default=None)

    def find(self, weight: Tensor) -> tuple[Pattern | None, str]:
        """Return the one of `forms` that a weight (out, in) without a mask obeys, and why it obeys none, "" else."""
        because = f"no {self.dtype} kernel here multiplies by a packed weight"
        for form in self.forms:
            if weight.shape[-1] % form.group:
                because = f"in_features {weight.shape[-1]} is not a multiple of {form.group}"
            elif (found := form.check(weight)).ok:
                return form, ""
            else:
                because = broken(form, found)
        return None, because

    def _find_rounded(self, weight: Packed) -> tuple[Pattern | None, str]:
        """Return as `find` what a dense weight of a file obeys; in whole numbers some of its zeros are roundings."""
        found, because = self.find(values := weight.unpack())
        counted = bool(self.forms) and values.shape[-1] % self.forms[-1].group == 0  # not a reason of shape alone
        rounded = counted and because and weight.header.group  # int4's few numbers make zeros where floats had none
        return found, f"{because} in {weight.header.dtype}" if rounded else because

    def pattern_of(self, name: str, weight: Packed | Tensor, said: Pattern | None) -> tuple[Pattern | None, str]:
        """Return what a weight (out, ..., in) obeys: what is said, else what its zeros show; and why nothing, "" else.

        Args:
            name: Of its layer.
            weight: Of the model, or of a file.
            said: The pattern of its mask or its file.

        Raises:
            PatternError: The weight holds NaN or infinity.
        """
        if isinstance(weight, Packed) and not weight.header.sparse:
            return (said, "") if said is not None else self._find_rounded(weight)
        if isinstance(weight, Packed):
            return said or weight.header.parsed(), ""
        if not is_finite(weight):
            raise non_finite("a weight", weight).for_layer(name)
        return (said, "") if said is not None else self.find(weight)

    def keeps(self, weight: Packed) -> bool:
        """Tell whether a packed weight is written as this type writes one: its kernels read the numbers as they are."""
        if weight.header.encoding != self.packed or bool(weight.header.group) != bool(self.packed.groups):
            return False
        return weight.zeros is None or bool(self.packed.groups)

    def encode(self, weight: Packed | Tensor, pattern: Pattern) -> tuple[Packed | Tensor, str]:
        """Return the weight (out, in) packed, and "", or as it was with the reason why it cannot be packed.

        A packed weight of another dtype (from a file) is written anew; of another pattern, in the form that kernels
        read, with the same numbers.

        Args:
            weight: What obeys `pattern`.
            pattern: The mask's, the file's, or the one that was found.
        """
        columns = weight.header.shape[1] if isinstance(weight, Packed) else weight.shape[1]
        form = self.form_of(pattern)
        if form is None:
            return weight, f"{pattern.name}: the {self.dtype} kernels read {_or(self.forms)}"
        if columns % form.group:
            return weight, f"in_features {columns} is not a multiple of {form.group}"
        try:
            if isinstance(weight, Packed):
                if self.keeps(weight):
                    return rewrite(weight, form), ""
                weight = weight.unpack().float()
            return pack(weight, form, self.stored, group=self.group, symmetric=self.symmetric), ""
        except PackingError as error:
            dense = dense_of(weight)
            found = form.check(dense)
            return dense, f"{error.what}: {error.got}" if found.ok else broken(form, found)


def broken(pattern: Pattern, found: Conformity) -> str:
    """Say how far a weight is from a pattern."""
    how = "have 3 or 4 non-zeros" if pattern.name == "2:4" else "break it"
    return f"not {pattern.name}, {found.groups - found.legal} of {found.groups} groups {how}"


def _or(patterns: Sequence[Pattern]) -> str:
    return " or ".join(pattern.name for pattern in patterns) or "no packed weight"


FLOAT32 = Computing()


def convolved(computing: Computing) -> Computing:
    """Return what convolutions compute in where Linears compute so: there are kernels in float32 and in int8."""
    return computing if computing.dtype == "int8" else FLOAT32
