"""Which convolutions compile replaces, with their weights, and the layers that take their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from twofour import masks, native
from twofour.compiler.choose import Progress, why
from twofour.compiler.choose_conv import choose_conv
from twofour.compiler.conv import CompiledConv, PreparedConv, conv_refusal, image_weight
from twofour.compiler.encoding import FLOAT32
from twofour.compiler.plan import LayerPlan, described
from twofour.errors import TwofourError
from twofour.kernels import find_convolution
from twofour.kernels.conv import SCATTERED, Geometry, Images
from twofour.measure.cache import Cache
from twofour.packing import Header, Packed, has_form, packed_bytes, packed_rule
from twofour.patterns import Pattern

NO_IMAGES = "no example: the size of its images is not known"


@dataclass(frozen=True, eq=False)
class ConvWeight:
    """The weight of a convolution to be replaced.

    Attributes:
        name: Name of the layer.
        kind: Class of the layer.
        weight: (out, in / groups, [height,] width) as the model or the file holds it.
        bias: (out,) or None.
        geometry: Strides, padding, dilation and groups.
        images: The input its kernel is chosen for.
        identity: Equal for tied weights.
        pattern: What the weight obeys along its input channels; None for a dense weight. See `LayerWeight`.
        dense_because: Why there is no pattern, "" where there is.
    """

    name: str
    kind: str
    weight: Packed | Tensor
    bias: Tensor | None
    geometry: Geometry
    images: Images
    identity: int
    pattern: Pattern | None = None
    dense_because: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return tuple(self.weight.header.shape if isinstance(self.weight, Packed) else self.weight.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense weight."""
        return 4 * self.geometry.out_channels * self.geometry.columns

    @property
    def bytes_in_file(self) -> int:
        """Bytes of the weight in a file: in the packed form of its pattern, or dense."""
        if self.pattern is None or not has_form(packed_rule(self.pattern), "float32"):
            return self.nbytes
        return packed_bytes(Header(self.pattern.rows.name, "float32", self.shape, 1))

    def dense(self) -> Tensor:
        """Return the weight (out, in / groups, height, width), made at each call."""
        weight = self.weight.unpack() if isinstance(self.weight, Packed) else self.weight
        return image_weight(weight).float()


def replaceable_convs(model: nn.Module, images: Mapping[str, Images]) -> Iterator[tuple[str, ConvWeight]]:
    """Yield the convolutions that compile replaces, by name: those whose images are known and that nothing forbids.

    Raises:
        PatternError: A weight holds NaN or infinity.
    """
    patterns = {name: mask.pattern for name, mask in masks.of(model).items()}
    for name, module in model.named_modules():
        if name in images and isinstance(module, nn.Conv1d | nn.Conv2d) and conv_refusal(module) is None:
            pattern = patterns.get(f"{name}.weight".lstrip("."))
            yield name, conv_weight(name, module, module.weight, module.bias, images[name], pattern)


def conv_weight(
    name: str,
    module: nn.Conv1d | nn.Conv2d,
    weight: Packed | Tensor,
    bias: Tensor | None,
    images: Images,
    pattern: Pattern | None = None,
) -> ConvWeight:
    """Describe the weight of a convolution.

    Args:
        name: Name of the layer.
        module: The layer.
        weight: The module's own or a file's.
        bias: (out,) or None, the module's own or a file's.
        images: The input its kernel is chosen for.
        pattern: What the weight is said to obey, by its mask or its file; None looks for it in the zeros.

    Raises:
        PatternError: The weight holds NaN or infinity.
    """
    held = weight if isinstance(weight, Packed) else weight.detach()
    bias = None if bias is None else bias.detach().float()
    last = held if isinstance(held, Packed) else held.movedim(1, -1)
    pattern, because = FLOAT32.pattern_of(name, last, pattern)
    described = type(module).__name__, held, bias, Geometry.of(module), images, id(weight), pattern, because
    return ConvWeight(name, *described)


def build_convs(
    weights: Mapping[str, ConvWeight],
    memory: str,
    footprint: int,
    cache: Cache,
    progress: Progress | None = None,
    before: int = 0,
) -> tuple[dict[str, CompiledConv], list[LayerPlan]]:
    """Measure each convolution and return the layers that take their places, with their plan.

    Args:
        weights: Layer name to its weight.
        memory: "fast" takes the fastest kernel, "small" a sparse one where the weight is 2:4.
        footprint: Bytes of the whole model's weights.
        cache: Times measured earlier on this machine.
        progress: See `compile`.
        before: Layers that were done before.
    """
    replacements: dict[str, CompiledConv] = {}
    plans: list[LayerPlan] = []
    shared: dict[tuple[int, str, Geometry, int], PreparedConv] = {}
    for done, (name, entry) in enumerate(weights.items()):
        if progress is not None:
            progress(before + done, before + len(weights), name)
        dense, given = entry.dense(), (entry.bias, entry.geometry, entry.images)
        options = {"memory": memory, "footprint": footprint, "cache": cache, "pattern": entry.pattern}
        try:
            choice, because = choose_conv(dense, *given, **options, because=entry.dense_because)
        except TwofourError as error:
            raise error.for_layer(name) from None
        (pixels,), (kernel,) = choice.times, choice.dispatch.names
        dimensions = 1 if entry.kind == "Conv1d" else 2
        key = entry.identity, kernel, entry.geometry, dimensions
        if key not in shared:
            tensor = find_convolution(kernel).prepare(dense, entry.geometry, entry.images)
            shared[key] = PreparedConv(kernel, entry.geometry, tensor, dimensions, entry.images)
        replacements[name] = CompiledConv(name, shared[key], entry.bias, images=entry.images)
        replacements[name].pattern = entry.pattern
        reason = why(choice, pixels, because, memory) + (f"; {SCATTERED}" if entry.geometry.scattered else "")
        sizes = entry.nbytes, shared[key].nbytes, entry.bytes_in_file
        plans.append(described(name, entry.kind, entry.shape, pixels, choice, reason, sizes))
        native.release_free_memory()
    return replacements, plans
