"""Layers of low bits in files: whole numbers and scales in packed form, and what `settings` says of each layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from twofour import quantization
from twofour.compiler.codes import CodedLayer, is_coded
from twofour.errors import FormatError, QuantizationError, cut
from twofour.export.file import Contents
from twofour.export.fit import misfit
from twofour.layers import CARRIED
from twofour.packing import Header, Packed
from twofour.patterns import Pattern
from twofour.quantization import LowBits, Widths
from twofour.quantization.carried import STEPS, WEIGHT_SCALE, WEIGHT_STEP, WEIGHT_ZERO, over, require_steps
from twofour.quantization.layer import add_steps, give_low_bits, take_low_bits
from twofour.quantization.stored import SCALES, empty_steps, packed_of, shared, steps_of_codes
from twofour.quantization.widths import encoding_of

LOW_BITS = "low_bits"
"""Key of the settings: layer -> how it computes."""

_FIELDS, _MORE = {"weights", "inputs", "static"}, {"group", "zeros", "scales"}


def described(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what `settings` says of a model's layers of low bits."""
    return {
        name: {
            "weights": held.widths.weights.name,
            "inputs": None if held.widths.inputs is None else held.widths.inputs.name,
            "static": held.static,
            **({"group": held.group} if held.group else {}),
            **({"zeros": True} if held.shifted else {}),
            **({"scales": "tensor"} if held.per_tensor else {}),
        }
        for name, held in quantization.of(model).items()
    }


def take_packed(
    model: nn.Module, plain: dict[str, Tensor], aliases: Mapping[str, str], patterns: Mapping[str, Pattern]
) -> Iterator[tuple[str, Packed]]:
    """Move weights of low bits and their scales from `plain` into packed form, where a compiled model has them already.

    A weight that another module has too, as an embedding that a head is tied to, stays a plain tensor with its step.

    Raises:
        QuantizationError: A step is zero, NaN or infinite, or a weight is not finite.
        PackingError: The whole numbers do not obey their mask.
    """
    elsewhere = shared(model)
    for name, held in quantization.of(model).items():
        module, key = model.get_submodule(name), _key(name, "weight")
        if not is_coded(module) and (id(module.weight) in elsewhere or key in aliases or key not in plain):
            continue
        packed = packed_of(name, module, held, patterns.get(key))
        for part in ("weight", *SCALES):
            plain.pop(_key(name, part), None)
        yield key, packed


def unpacked(model: nn.Module) -> dict[str, Tensor]:
    """Return weights and steps of the layers that have codes in their place, by name: floats for the same numbers."""
    found: dict[str, Tensor] = {}
    for name, held in quantization.of(model).items():
        module = model.get_submodule(name)
        if (codes := held.codes(module)) is not None:
            parts = {"weight": cast(Tensor, module.weight).clone(), **steps_of_codes(held, codes)}
            found |= {_key(name, part): tensor for part, tensor in parts.items()}
    return found


def patterns_of_codes(model: nn.Module) -> dict[str, Pattern]:
    """Return what the weights obey that stand in codes, by name."""
    layers = {name: model.get_submodule(name) for name in quantization.of(model)}
    held = {_key(name, "weight"): module.pattern for name, module in layers.items() if isinstance(module, CodedLayer)}
    return {key: pattern for key, pattern in held.items() if pattern is not None}


def with_low_bits(path: Any, model: nn.Module, contents: Contents) -> tuple[nn.Module, Contents]:
    """Return a model whose layers compute as a file says, without values for their steps, and the steps as tensors.

    A file without layers of low bits changes nothing. Else the model is a copy that shares every tensor with the one
    that is given.

    Raises:
        FormatError: `settings` says what means nothing, or nothing of this model; a weight's codes or steps are others
            than it says.
    """
    found = parse_low_bits(path, contents.settings.get(LOW_BITS))
    if not found:
        return model, contents
    _require_layers(path, model, found)
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    steps: dict[str, Tensor] = {}
    for name, held in found.items():
        own = {part: found for part in STEPS if (found := contents.plain.get(_key(name, part))) is not None}
        own |= _scales(path, name, held, contents.packed.get(_key(name, "weight")))
        _require_steps(path, name, held, own)
        real = {part: step.float() if step.is_floating_point() else step for part, step in own.items()}
        steps |= {_key(name, part): step for part, step in real.items()}
        _put(twin.get_submodule(name), held, fixed=WEIGHT_SCALE in own)
    return twin, replace(contents, plain={**contents.plain, **steps})


def adopt(model: nn.Module, twin: nn.Module) -> list[Callable[[], object]]:
    """Let the layers of a model compute as those of its twin, by steps that a file fills in; returns what undoes it.

    A layer that computes so already keeps its steps, the same parameters.
    """
    undo: list[Callable[[], object]] = []
    for name in quantization.of(twin):
        module, other = model.get_submodule(name), twin.get_submodule(name)
        if quantization.held_by(module) is None:
            undo.append(partial(take_low_bits, module))
        elif WEIGHT_SCALE in other._buffers.keys() - module._buffers.keys():
            undo.append(partial(module._buffers.pop, WEIGHT_SCALE, None))
        _put(module, other.__dict__[CARRIED], fixed=WEIGHT_SCALE in other._buffers)
    return undo


def _put(module: nn.Module, held: LowBits, *, fixed: bool) -> None:
    """Let a layer compute as a file says; steps that it has stay."""
    own = {**module._parameters, **module._buffers} if quantization.held_by(module) is not None else {}
    steps = {name: step for name, step in empty_steps(module, held, fixed=fixed).items() if own.get(name) is None}
    if own:
        add_steps(module, steps)
    else:
        give_low_bits(module, replace(held, runs=None), steps)


def require_codes(path: Any, fast: nn.Module, contents: Contents) -> None:
    """Refuse a model in whose dtype the whole numbers of a file are not held: in float16 small scales are none.

    Raises:
        FormatError: A weight's whole numbers are others than those of the file.
    """
    for name, held in quantization.of(fast).items():
        packed, module = contents.packed.get(_key(name, "weight")), fast.get_submodule(name)
        if packed is None or module.weight.dtype is torch.float32:  # float32 holds them: quantization/stored.py
            continue
        codes = replace(packed, header=replace(packed.header, group=0), scales=None, zeros=None).unpack()
        zeros = over(module.get_buffer(WEIGHT_ZERO), codes).to(codes.dtype) if held.shifted else 0
        if not torch.equal(held.whole_weight(module, name)[0], codes - zeros):
            got = f"`{name}` holds its weight in {module.weight.dtype}, which loses whole numbers of the file"
            raise misfit("low-bits-codes", path, got)


def _key(layer: str, part: str) -> str:
    return f"{layer}.{part}".lstrip(".")


def parse_low_bits(path: Any, said: object) -> dict[str, LowBits]:
    """Return the layers of low bits that the settings of a file name, {} where they name none.

    Raises:
        FormatError: What they say means nothing.
    """
    if said is None:
        return {}
    if not isinstance(said, dict) or not all(isinstance(name, str) for name in said):
        raise _malformed(path, f"low_bits {cut(repr(said), 80)}")
    return {name: _held(path, name, fields) for name, fields in said.items()}


def _told(held: LowBits) -> str:
    """Return how a layer computes, in words: "w4a8 with groups of 32 and one range of inputs"."""
    parts = [f"groups of {held.group}"] if held.group else []
    parts += ["one scale of its weight"] if held.per_tensor else []
    parts += ["zero points"] if held.shifted else []
    if held.widths.inputs is not None:
        parts.append("one range of inputs" if held.static else "a range of inputs for each token")
    return f"{held.widths.name}{' with ' if parts else ''}{' and '.join(parts)}"


_IN_FLOATS = {
    "wanted": "a model of the same architecture in floats, or in the low bits of the file",
    "remedy": "leave `twofour.quantize` out (`quantization.remove` takes it off): the file says how its layers compute",
}
"""What is said of a model whose layers compute otherwise than in the file."""


def _require_layers(path: Any, model: nn.Module, found: Mapping[str, LowBits]) -> None:
    """Refuse layers that the model has not, or that compute otherwise there.

    Raises:
        FormatError: There is one.
    """
    modules, own = dict(model.named_modules()), quantization.of(model)
    for name, held in found.items():
        module = modules.get(name)
        if not isinstance(module, nn.Linear | nn.Conv2d):
            raise misfit("model-low-bits", path, f"`{cut(name, 80)}` is no Linear or Conv2d of the model")
        if name in own and own[name] != held:
            got = f"`{name}` is {_told(held)} in the file and {_told(own[name])} in the model"
            raise misfit("model-low-bits", path, got, **_IN_FLOATS)
        if held.group and (not isinstance(module, nn.Linear) or module.in_features % held.group):
            got = f"`{name}`: groups of {held.group} do not divide a Linear's inputs there"
            raise misfit("model-low-bits", path, got)
        _require_length(path, name, held, module.weight[0].numel())
    if other := sorted(own.keys() - found.keys()):
        got = f"`{other[0]}` computes in low bits in the model and not in the file"
        raise misfit("model-low-bits", path, got, **_IN_FLOATS)


def _held(path: Any, name: str, fields: object) -> LowBits:
    said = _malformed(path, f"low_bits of `{cut(name, 80)}`: {cut(repr(fields), 80)}")
    if not isinstance(fields, dict) or fields.keys() - _MORE != _FIELDS or type(fields["static"]) is not bool:
        raise said
    group, zeros = fields.get("group", 0), fields.get("zeros", False)
    if type(group) is not int or group < 0 or type(zeros) is not bool or fields.get("scales", "tensor") != "tensor":
        raise said
    try:
        weights, inputs = encoding_of(fields["weights"], "weights"), encoding_of(fields["inputs"], "activations")
    except (QuantizationError, TypeError) as error:
        raise said from error
    if weights is None or (inputs is None and fields["static"]) or (zeros and weights.levels != "twos"):
        raise said
    if group and "scales" in fields:
        raise said
    return LowBits(Widths(weights, inputs), fields["static"], group, zeros, "scales" in fields, name=name)


def require_header(path: Any, name: str, held: LowBits, header: Header, *, scaled: bool = True) -> None:
    """Refuse a packed weight of a layer of low bits that its widths do not fit, or whose sums are too long.

    Raises:
        FormatError: The encoding or the pattern is another one, or sums could exceed 32 bits.
    """
    encoding, want, what = header.encoding, held.widths.weights, "a weight of low bits of the file"
    if (getattr(encoding, "levels", ""), encoding.bits) != (want.levels, want.bits) or not scaled:
        got = (
            f"`{name}` is said to be of {want.name} and packed as {encoding.name} with {'' if scaled else 'no '}scales"
        )
        raise misfit("low-bits-codes", path, got, what)
    if header.sparse and not want.has_zero:
        got = f"`{name}` is packed as {header.pattern}, and {want.name} has no zero"
        raise misfit("low-bits-codes", path, got, what)
    if header.group != held.group:
        got = f"`{name}` is said to have groups of {held.group} and packed in groups of {header.group}"
        raise misfit("low-bits-codes", path, got, what)
    _require_length(path, name, held, math.prod(header.shape[1:]))


def _require_length(path: Any, name: str, held: LowBits, count: int) -> None:
    if (count := held.group or count) > held.widths.longest(shifted=held.shifted):
        raise misfit("model-low-bits", path, f"`{name}`: sums of {count} products may exceed 32 bits")


def _scales(path: Any, name: str, held: LowBits, packed: Packed | None) -> dict[str, Tensor]:
    """Return the scales of a packed weight as the layer has them; of a plain one there are none to return."""
    if packed is None:
        return {}
    require_header(path, name, held, packed.header, scaled=packed.scales is not None)
    assert packed.scales is not None
    shifted = packed.zeros is not None
    if shifted is not held.shifted or len(packed.scales) != packed.header.shape[0]:
        got = f"`{name}` has scales {tuple(packed.scales.shape)}, zero points {shifted}"
        raise misfit("low-bits-codes", path, got, "a weight of low bits of the file")
    found = {WEIGHT_STEP if held.learned else WEIGHT_SCALE: packed.scales}
    found |= {} if packed.zeros is None else {WEIGHT_ZERO: packed.zeros}
    if held.per_tensor and any((rows != rows[0]).any() for rows in found.values()):
        raise misfit("low-bits-codes", path, f"`{name}` has one scale and rows of others", "a weight of low bits")
    found = {part: rows[:1] if held.per_tensor else rows for part, rows in found.items()}
    return {part: rows if held.group else rows.flatten() for part, rows in found.items()}


def _require_steps(path: Any, name: str, held: LowBits, steps: Mapping[str, Tensor]) -> None:
    try:
        require_steps(held, steps, name)
    except (QuantizationError, RuntimeError) as error:
        what = "steps of whole numbers or truth values"
        if isinstance(error, QuantizationError):
            what = f"{error.got}, which is none of {error.wanted}"
        raise misfit("low-bits-step", path, f"`{name}`: {what}", "a step of a layer of low bits") from error


def _malformed(path: Any, got: str) -> FormatError:
    return FormatError(
        "the file says what means nothing of a layer of low bits",
        got=f"{path}: {got}",
        wanted="weights and inputs in encodings that layers compute in, and whether inputs have one step",
        remedy="write the file again with twofour.save",
        code="settings-low-bits",
    )
