"""What gates stand on: channels of a model by their batch norms or a learned scale, and residual blocks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from twofour import calls
from twofour.layers import PrunableWeight, walk
from twofour.structure.coupling.group import along
from twofour.structure.shrink import Channels, Cuttable
from twofour.structure.shrink.absorb import KINDS, Seen, absorbs, inputs_seen
from twofour.training.schemes.slots import tied

_log = logging.getLogger("twofour.training")

LEAST = 1 / 16
"""Share of a layer's channels that stays at least: a layer without any would cut the network in two."""

Target = tuple[nn.Module, str]
"""A module and the attribute of one of its parameters."""


class Scaled(nn.Module):
    """A parametrisation: a tensor times its gates.

    Args:
        gate: (gates,) factors, 1 at the beginning.
        axis: Axis of the tensor along which they stand.
        index: (size of the axis) which gate, -1 where none.
    """

    index: Tensor

    def __init__(self, gate: nn.Parameter, axis: int, index: Tensor) -> None:
        super().__init__()
        self.gate, self.axis = gate, axis
        self.register_buffer("index", index.to(gate.device), persistent=False)

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the tensor with each position of the axis times its gate."""
        factor = torch.where(self.index < 0, torch.ones_like(self.gate[:1]), self.gate[self.index.clamp(min=0)])
        return tensor * along(factor, self.axis, tensor.ndim)


@dataclass(eq=False)
class Gated:
    """Gates that are decided on together: of the channels of one group, or of one block.

    Attributes:
        name: Of the group, or of the block's module.
        size: How many gates.
        held: Parameters that hold them, and for each position which gate it is, -1 where none.
        scales: Tensors that are multiplied with them; none where the parameters are a batch norm's own.
        weight: How strongly they are pulled, 1 on average.
        block: Whether it is a block's.
    """

    name: str
    size: int
    held: list[tuple[nn.Parameter, Tensor]]
    scales: list[tuple[Target, Scaled]]
    weight: float = 1.0
    block: bool = False

    def __post_init__(self) -> None:
        self.held = [(parameter, index.to(parameter.device)) for parameter, index in self.held]

    @torch.no_grad()
    def energy(self) -> Tensor:
        """Return (size,) the squares of each gate, summed over all that are tied, in float64 on the CPU."""
        total = torch.zeros(self.size, dtype=torch.float64, device="cpu")
        for parameter, index in self.held:
            here = index >= 0
            total.index_add_(0, index[here].cpu(), parameter.detach()[here].to("cpu", torch.float64).square())
        return total

    @torch.no_grad()
    def pull(self, parameter: nn.Parameter, threshold: float) -> None:
        """Move the gates in one parameter towards zero by a threshold, exactly to zero within it."""
        for held, index in self.held:
            if held is parameter:
                soft = parameter.sign() * (parameter.abs() - threshold).clamp_min(0)
                parameter.copy_(torch.where(index >= 0, soft, parameter))

    @torch.no_grad()
    def close(self, gone: Tensor) -> None:
        """Set gates to zero, (size,) booleans."""
        for parameter, index in self.held:
            shut = (index >= 0) & gone.to(index.device)[index.clamp(min=0)]
            parameter.masked_fill_(shut, 0)


def channel_gates(model: nn.Module, groups: Sequence[Cuttable], example: Any) -> list[Gated]:
    """Return gates for each group: the scales of its batch norms, else a learned scale of what reads it.

    Batch norms are gates where all that reads the channels is behind one of them: a reader of the raw channels would
    lose what their scales do not close. What has neither is left out, with a log line: readers that are tied or are no
    Linear and no convolution.
    """
    weights = walk(model, eligibility="any", tied="*", empty=True).by_name
    norms = {group.name: held for group in groups if (held := list(_norms(model, group)))}
    closing = _closing(model, [group for group in groups if group.name in norms], weights, example)
    shared, found = tied(model), list[Gated]()
    for group in groups:
        if group.name in closing:
            held = [(model.get_parameter(name), index) for name, index in norms[group.name]]
            gated: Gated | None = Gated(group.name, group.size, held, [])
        else:
            gated = _learned(model, group, weights, shared)
        if gated is None:
            _log.info("`%s` has no gates: its readers are tied, or no Linear and no convolution", group.name)
        else:
            found.append(gated)
    return found


def _norms(model: nn.Module, group: Cuttable) -> Iterator[tuple[str, Tensor]]:
    """Yield the scales of the batch norms that hold each channel of a group once, by name, and which channel it is."""
    for place in group.group.places:
        module, attribute = _target(model, place.name)
        channels = place.index[place.index >= 0]
        each_once = len(channels) == len(channels.unique()) == group.size
        if each_once and attribute == "weight" and isinstance(module, _BatchNorm) and module.affine:
            yield place.name, place.index


@torch.no_grad()
def _closing(
    model: nn.Module, groups: Sequence[Cuttable], weights: Mapping[str, PrunableWeight], example: Any
) -> set[str]:
    """Return the groups, all of which have batch norms, whose readers get constants once the norms' scales are zero.

    In a copy all scales are zero and what makes the channels is random, the second time with the other sign. What a
    reader gets from a norm is its shift both times; what passes by the norm differs.
    """
    readers = {group.name: [weights.get(name) for name in group.group.consumers] for group in groups}
    known = {name: [r for r in found if r is not None and absorbs(r)] for name, found in readers.items()}
    groups = [group for group in groups if known[group.name] and len(known[group.name]) == len(readers[group.name])]
    if not groups:
        return set()
    twin, seen = copy.deepcopy(model), dict[str, Seen]()
    for sign in (1.0, -1.0):
        generator = torch.Generator().manual_seed(0)
        for group in groups:
            _close(twin, group, weights, generator, sign)
        for name, one in inputs_seen(twin, _on(twin, {n for g in groups for n in g.group.consumers}), example).items():
            seen[name] = seen[name].joined(one) if name in seen else one
    return {group.name for group in groups if all(_gets_constants(group, r, seen) for r in known[group.name])}


def _on(model: nn.Module, names: set[str]) -> list[PrunableWeight]:
    """Return the weights of a model that have some of the names."""
    return [w for w in walk(model, eligibility="any", tied="*", empty=True).weights if names & set(w.names)]


def _close(
    twin: nn.Module, group: Cuttable, weights: Mapping[str, PrunableWeight], generator: torch.Generator, sign: float
) -> None:
    """Set the scales of a group's norms to zero, their shifts to positive numbers, and what makes it to others."""
    norms = {name.rpartition(".")[0] for name, _ in _norms(twin, group)}
    parameters = dict(twin.named_parameters())
    for place in group.group.places:
        values, (layer, _, attribute) = parameters.get(place.name), place.name.rpartition(".")
        reads = place.name in group.group.consumers and weights[place.name].axis.axis == place.axis
        if values is None or reads:
            continue
        # Of sizes 0.5 to 1.5, and sums of as many as a row has near 1.
        random = torch.empty(values.shape, dtype=torch.float32, device="cpu").uniform_(-1, 1, generator=generator)
        random = sign * (random + 0.5 * random.sign())
        random /= max(values.numel() // values.shape[place.axis], 1) ** 0.5
        if layer in norms:
            random = torch.zeros_like(random) if attribute == "weight" else random.abs()
        here = along(place.index >= 0, place.axis, values.ndim).to(values.device)
        values.copy_(torch.where(here, random.to(values), values))


def _gets_constants(group: Cuttable, reader: PrunableWeight, seen: Mapping[str, Seen]) -> bool:
    """Whether a reader gets one number from each channel of a group, at every place and every time."""
    if reader.name not in seen:
        return False
    constant, places = seen[reader.name].constant.cpu(), group.group.places
    own = [place.index for place in places if place.name in reader.names and place.axis == reader.axis.axis]
    return bool(own) and all(len(i) == len(constant) and bool((constant | (i < 0)).all()) for i in own)


def _learned(
    model: nn.Module, group: Cuttable, weights: Mapping[str, PrunableWeight], shared: set[int]
) -> Gated | None:
    readers = [weights.get(name) for name in group.group.consumers]
    known = [reader for reader in readers if reader and reader.kind in KINDS and id(reader.parameter) not in shared]
    if not known or len(known) < len(readers):
        return None
    gate = nn.Parameter(torch.ones_like(known[0].parameter.detach().flatten()[:1]).repeat(group.size))
    scales = [
        (_target(model, reader.name), Scaled(gate, place.axis, place.index))
        for reader in known
        for place in group.group.places_of(reader.name)
        if place.axis == reader.axis.axis
    ]
    if len(scales) != len(known):
        return None
    return Gated(group.name, group.size, [(gate, torch.arange(group.size, device=gate.device))], scales)


def _target(model: nn.Module, name: str) -> Target:
    module, _, attribute = name.rpartition(".")
    return model.get_submodule(module), attribute


def weigh(gated: Sequence[Gated], found: Channels) -> None:
    """Weigh the gates of each group by the parameters that go with one of its channels, 1 on average."""
    prices = dict[str, float]()
    for one in gated:
        places = [place for place in found.by_name[one.name].group.places if place.name in found.shapes]
        lines = (prod(found.shapes[p.name]) / len(p.index) * int((p.index >= 0).sum()) for p in places)
        prices[one.name] = sum(lines) / one.size
    mean = sum(prices.values()) / max(len(prices), 1)
    for one in gated:
        one.weight = prices[one.name] / mean


def block_gates(model: nn.Module, found: Channels, example: Any) -> list[Gated]:
    """Return one gate for each block that is the identity once the ends of its branches are zero.

    A block is an entry of an `nn.Sequential` or `nn.ModuleList`. The ends of its branches are the layers that write
    into a residual stream, or their batch norms; which of them is seen by setting them to zero in a copy of the model
    and running it on the example.
    """
    ends: dict[str, list[str]] = {}
    for candidates in (_writers(model, found), _last_norms(model)):
        named = {name: tensors for name, tensors in candidates.items() if tensors and name not in ends}
        for name in _identities(model, named, example):
            ends[name] = named[name]
    inner = [name for name in ends if not any(other.startswith(f"{name}.") for other in ends)]
    sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in inner}
    return [_block(model, name, ends[name], sizes[name] * len(sizes) / sum(sizes.values())) for name in inner]


def _block(model: nn.Module, name: str, ends: Sequence[str], weight: float) -> Gated:
    targets = [_target(model, end) for end in ends]
    gate = nn.Parameter(torch.ones_like(targets[0][0].get_parameter(targets[0][1]).detach().flatten()[:1]))
    scales = [
        (
            target,
            Scaled(gate, 0, torch.zeros(target[0].get_parameter(target[1]).shape[0], dtype=torch.long, device="cpu")),
        )
        for target in targets
    ]
    return Gated(name, 1, [(gate, torch.zeros(1, dtype=torch.long, device=gate.device))], scales, weight, True)


def _entries(model: nn.Module) -> list[str]:
    held = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Sequential | nn.ModuleList)
    ]
    return [f"{name}.{key}" if name else key for name, module in held for key in module._modules]


def _writers(model: nn.Module, found: Channels) -> dict[str, list[str]]:
    """Return the weights and biases of each entry's layers that write into a residual stream."""
    shared, writers = tied(model), list[str]()
    for weight in walk(model, eligibility="any", tied="*", empty=True).weights:
        streams = [g.group.places_of(weight.name) for g in found.groups if g.group.stream]
        writes = any(place.axis != weight.axis.axis for places in streams for place in places)
        if writes and weight.kind in KINDS and id(weight.parameter) not in shared:
            writers.append(weight.name)
            if getattr(weight.module, "bias", None) is not None:
                writers.append(f"{weight.layer}.bias")
    return {entry: [name for name in writers if name.startswith(f"{entry}.")] for entry in _entries(model)}


def _last_norms(model: nn.Module) -> dict[str, list[str]]:
    """Return the scale and shift of the last batch norm of each entry."""
    found: dict[str, list[str]] = {}
    for entry in _entries(model):
        parts = model.get_submodule(entry).named_modules(prefix=entry)
        norms = [name for name, part in parts if isinstance(part, _BatchNorm) and part.affine and name != entry]
        found[entry] = [f"{norms[-1]}.weight", f"{norms[-1]}.bias"] if norms else []
    return found


@torch.no_grad()
def _identities(model: nn.Module, ends: Mapping[str, Sequence[str]], example: Any) -> list[str]:
    """Return the entries that hand on what they get once their ends are zero, wherever they are called.

    One after the other, so that none gets zeros from another; and behind batch norms as training may leave them, since
    fresh ones hand zeros on.
    """
    twin, found = copy.deepcopy(model), list[str]()
    generator = torch.Generator().manual_seed(0)
    for norm in twin.modules():
        for values in (norm.running_mean, norm.bias) if isinstance(norm, _BatchNorm) else ():
            if values is not None:
                values.copy_(torch.empty_like(values, device="cpu").uniform_(0.5, 1.5, generator=generator))
    for name, tensors in ends.items():
        parameters = [twin.get_parameter(tensor) for tensor in tensors]
        before = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.zero_()
        found += handing_on(twin, [name], example)
        for parameter, values in zip(parameters, before, strict=True):
            parameter.copy_(values)
    return found


@torch.no_grad()
def handing_on(model: nn.Module, names: Sequence[str], example: Any) -> list[str]:
    """Return the modules, of some, that hand on what they get, wherever they are called on an example."""
    same, held = dict[str, bool](), dict[str, Any]()

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = calls.first_input(args, kwargs)
        held[name] = given.clone() if isinstance(given, Tensor) else None  # a block may work in place

    def see(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, answer = held.pop(name), output[0] if isinstance(output, tuple) else output
        alike = isinstance(answer, Tensor) and isinstance(given, Tensor) and torch.equal(answer, given)
        same[name] = same.get(name, True) and alike

    observed = calls.observing([(name, model.get_submodule(name)) for name in names], keep, see)
    with calls.evaluating(model), calls.without_cache(model), observed:
        calls.Example.of(example).run(model)
    return [name for name, fits in same.items() if fits]
