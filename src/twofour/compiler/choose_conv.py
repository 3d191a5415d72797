"""Measure every kernel that could serve a convolution on images of the example's size, and keep the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from twofour.compiler.choose import ROTATED_BYTES, Choice, race_kernels
from twofour.compiler.computing import broken
from twofour.compiler.conv import CompiledConv
from twofour.compiler.layer import PreparedWeights
from twofour.compiler.replaceable import LayerWeight
from twofour.kernels import convolutions, find
from twofour.kernels.base import Prepared, widest
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry, Images, channels_last
from twofour.kernels.conv_operator import to_numbers
from twofour.kernels.dispatch import DispatchTable
from twofour.measure.cache import Cache
from twofour.packing import Packed, dense_of, pack
from twofour.patterns import Pattern

LIBRARY_CALL = 1e-5
"""Seconds that a library's call takes more in a recorded run than one of ours: both are measured through Python."""

LIBRARY_BYTE = 1e-10
"""Seconds for each byte of its answer that it takes more there: torch allocates that outside of what a graph plans and
the caches keep, and no call of several convolutions in a row may take it in. MobileNetV2's first three by libraries
took 590 us alone and 1212 in the model; by ours 724 and 1029."""

_READ = {"block": "blocks", "hybrid": "2:4 with dense groups"}
"""What rows of the forms of many patterns read."""

MOST_COPIES = 16
"""Copies of a weight that one candidate rotates over, at most: packing each takes time."""


@dataclass(frozen=True)
class ConvCase:
    """A convolution for which a kernel is chosen.

    Attributes:
        name: Of its layer.
        weight: (out, in / groups, height, width).
        bias: float32 (out,) or None.
        problem: The geometry, and the activation.
        images: The input it is chosen for.
        pattern: What the weight obeys along its input channels, None for a dense one.
        because: Why there is no pattern.
        residual: Whether a tensor is added before the activation.
        dtype: Computing type of the model: in int8 rows of float32 are candidates too.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    problem: ConvProblem
    images: Images
    pattern: Pattern | None = None
    because: str = ""
    residual: bool = False
    dtype: str = "float32"

    @classmethod
    def of(cls, entry: LayerWeight) -> ConvCase:
        """Return the case of a layer by itself."""
        problem, weight = entry.problem, entry.weight
        assert isinstance(problem, ConvProblem), entry.name
        dense = dense_of(weight).float()  # one in bfloat16 is widened, once
        found = entry.name, dense, entry.bias, problem, entry.images, entry.pattern, entry.dense_because
        return cls(*found, dtype=entry.computing.dtype)

    @property
    def fused(self) -> bool:
        """Whether a kernel has more to do than sums; see `more_than_sums`."""
        return more_than_sums(self.problem, self.residual)

    @property
    def text(self) -> str:
        """Return what times are kept under."""
        numbers, size = "/".join(map(str, to_numbers(self.problem.geometry))), "x".join(map(str, self.images))
        steps = [f"+{self.problem.activation}"] if self.problem.activation != "none" else []
        steps = [*(["+bias"] if self.bias is not None else []), *(["+add"] if self.residual else []), *steps]
        steps += [] if self.dtype == "float32" else [f"+{self.dtype}"]
        steps += [] if self.problem.quantization.dynamic else ["+static"]
        return f"conv/{numbers}{''.join(steps)}@{size}"

    def inputs(self) -> list[Tensor]:
        """Draw the input, channels last, and what is added."""
        draw, geometry, (count, *size) = torch.Generator().manual_seed(0), self.problem.geometry, self.images
        shapes = [(count, geometry.in_channels, *size)]
        shapes += [(count, geometry.out_channels, *geometry.output(size[0], size[1]))] if self.residual else []
        return [
            channels_last(torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")) for shape in shapes
        ]


def more_than_sums(problem: ConvProblem, residual: bool) -> bool:
    """Tell whether a kernel does something besides sums in its pass, or in one of its own.

    That is a residual or an activation behind them, or other zeros on one side of the image than on the other.
    """
    return residual or problem.activation != "none" or not problem.geometry.symmetric


def conv_candidates(
    weight: Tensor,
    geometry: Geometry,
    pattern: Pattern | None,
    because: str,
    close: bool = False,
    *,
    native_alone: bool = False,
    dtype: str = "float32",
) -> tuple[tuple[ConvKernel, ...], str]:
    """Return the kernels worth measuring for a convolution, and why none of them is sparse, "" when some are.

    Of the native rows only those of the highest instruction-set level of each type are worth measuring.

    Args:
        weight: (out, in / groups, height, width).
        geometry: Of the convolution.
        pattern: What the weight obeys along its input channels, None for a dense one.
        because: Why there is no pattern.
        close: Whether rows whose error is larger than a sum's are candidates.
        native_alone: Leave the libraries' rows out, where a native one fits.
        dtype: Computing type: rows of float32 are candidates in every one.
    """
    rows = [k for k in convolutions() if k.dtype in ("float32", dtype)]
    fitting = [k for k in rows if not k.sparse and not k.refuses(geometry)]
    if native_alone:
        fitting = [k for k in fitting if k.isa != "any"] or fitting
    own = _widest([k for k in fitting if k.isa != "any" and not k.close])
    dense = (*(k for k in fitting if k.isa == "any" and not k.close), *own)
    dense += tuple(widest([k for k in fitting if k.close])) if close else ()
    sparse = [k for k in rows if k.sparse]
    if pattern is None:
        refusals = [kernel.refuses(geometry) for kernel in sparse if kernel.form is not None]
        return dense, because if None in refusals else str(refusals[0])
    taking = [kernel for kernel in sparse if kernel.takes(pattern)]
    if not taking:
        able = [kernel for kernel in sparse if kernel.refuses(geometry) is None] or sparse
        read = dict.fromkeys(_READ.get(kernel.pattern, kernel.pattern) for kernel in able)
        return dense, f"{pattern.name}: the convolutions' kernels read {' or '.join(read)}"
    fitting = [kernel for kernel in taking if kernel.refuses(geometry) is None]
    if not fitting:
        return dense, f"{pattern.name}: {taking[0].refuses(geometry)}"
    form = fitting[0].form or pattern
    if not (found := form.check(weight.movedim(1, -1))).ok:
        return dense, broken(form, found)
    return (*_widest(fitting), *dense), ""


def _widest(rows: Sequence[ConvKernel]) -> list[ConvKernel]:
    """Return the rows of the highest instruction-set level of each computing type."""
    types = dict.fromkeys(row.dtype for row in rows)
    return [row for dtype in types for row in widest([one for one in rows if one.dtype == dtype])]


def _packed(weight: Tensor, pattern: Pattern | None, kernels: Sequence[ConvKernel]) -> Packed | None:
    """Return a weight packed for kernels that read the forms of many patterns: its zeros do not say which is meant."""
    if pattern is None or not any(kernel.sparse and kernel.form is None for kernel in kernels):
        return None
    return pack(weight, pattern, axis=1)


def not_measured(geometry: Geometry, memory: str, close: bool) -> str:
    """Say why rows whose error is larger than a sum's were no candidates for a convolution, "" if they were."""
    if (close and memory == "fast") or not any(k.close and k.refuses(geometry) is None for k in convolutions()):
        return ""
    why = (
        "its weight is larger than the plain one"
        if close
        else "its error is larger than a sum's, rules='close' allows it"
    )
    return f"Winograd's algorithm was not measured: {why}"


def pick(times: Mapping[str, float], memory: str, *, fused: bool = False, written: int = 0) -> ConvKernel:
    """Return the kernel to use: the fastest, or with memory="small" the fastest sparse one where there is one.

    One that is ahead of the others by less than its `lead` counts as slower; `fused`: what a pass of its own would cost
    is in the times; `written`: bytes of the answer.
    """
    kernels = [find(name, ConvKernel) for name in times]
    pool = [kernel for kernel in kernels if kernel.sparse and memory == "small"] or kernels

    def cost(kernel: ConvKernel) -> float:
        lead = max(kernel.lead, 1.0) if fused else kernel.lead
        return times[kernel.name] * lead + (LIBRARY_CALL + LIBRARY_BYTE * written if kernel.isa == "any" else 0.0)

    return min(pool, key=cost)


def choose_conv(
    case: ConvCase, *, memory: str, footprint: int, cache: Cache, close: bool = False, native_alone: bool = False
) -> tuple[Choice, str]:
    """Measure the candidates for one convolution on channels-last images and keep the fastest.

    Args:
        case: Its weight, what follows, and the images it is chosen for.
        memory: "fast" takes the fastest kernel, "small" a sparse one where there is one.
        footprint: Bytes of the whole model's weights; see `choose`.
        cache: Times measured earlier on this machine.
        close: Whether rows whose error is larger than a sum's are candidates; not with memory="small", as their weights
            are larger.
        native_alone: As `conv_candidates` takes it.

    Returns:
        The choice at the output's pixels of all images, and why no sparse kernel was measured, "" when one was.
    """
    problem, images, weight, geometry = case.problem, case.images, case.weight, case.problem.geometry
    close = close and memory == "fast"
    options = {"native_alone": native_alone, "dtype": case.dtype}
    kernels, because = conv_candidates(weight, geometry, case.pattern, case.because, close, **options)
    copies = min(MOST_COPIES, max(1, min(footprint, ROTATED_BYTES) // (weight.numel() * 4)))
    packed = _packed(weight, case.pattern, kernels)
    key = cache.key(case.text + ("" if packed is None else f"/{packed.header.pattern}"), copies)

    def prepare(kernel: ConvKernel) -> Prepared:
        return kernel.prepare(packed if packed is not None and kernel.sparse else weight, geometry, images)

    def measure() -> tuple[dict[str, float], float]:
        inputs = case.inputs()

        def call(kernel: ConvKernel, made: Prepared) -> Callable[[], object]:
            alone = DispatchTable((), (kernel.name,)), PreparedWeights([made])
            return partial(CompiledConv("measured", problem, *alone, case.bias, images), *inputs)

        return race_kernels(kernels, prepare, call, copies, f"{problem} on {images}")

    times = cache.times(key, [kernel.name for kernel in kernels], measure)
    count, height, width = images
    pixels = count * prod(geometry.output(height, width))
    chosen = pick(times, memory, fused=case.fused, written=4 * pixels * geometry.out_channels)
    layouts = {chosen.layout: prepare(chosen)}
    return Choice(DispatchTable((), (chosen.name,)), {pixels: times}, layouts, cache.origin([key])), because
