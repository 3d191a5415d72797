"""What the tensors of a checkpoint are: the parameters of the model that its config.json describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from twofour.checkpoints.checkpoint import Checkpoint
from twofour.checkpoints.configuration import empty_model
from twofour.errors import FormatError, LayerError
from twofour.layers import PrunableWeight, Skipped, Walk, walk


@dataclass(frozen=True, eq=False)
class Structure:
    """The model of a checkpoint, on the meta device, and which of its tensors are which parameters.

    Attributes:
        model: The model, without values; tied parameters are one object, as after loading.
        parameters: Tensor name in the files -> parameter or buffer name in the model.
        unknown: Tensor name in the files -> why it is no single parameter of the model.
    """

    model: nn.Module
    parameters: Mapping[str, str]
    unknown: Mapping[str, str]

    def walk(self, **options: Any) -> Walk:
        """Walk over the model as `layers.walk` does, taking the weights although they have no values here."""
        return walk(self.model, empty=True, **options)

    def stored(self, weight: PrunableWeight | Skipped) -> tuple[str, ...]:
        """Return the names of the tensors that hold a weight: one; more where a tied one was written twice, or none."""
        return tuple(self._tensors.get(self._identities[weight.name], ()))

    @cached_property
    def _identities(self) -> dict[str, int]:
        return {name: id(value) for name, value in _named(self.model)}

    @cached_property
    def _tensors(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for stored, parameter in self.parameters.items():
            found.setdefault(self._identities[parameter], []).append(stored)
        return found


def structure(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Structure:
    """Make the model of a checkpoint on the meta device and find the tensors' parameters in it.

    Names are mapped as `from_pretrained` maps them: the prefix of the base model may be missing or superfluous, and
    transformers' own renamings of older checkpoints hold. A tensor from which transformers computes another parameter
    on loading, such as an expert that is stacked with others, belongs to none.

    Args:
        checkpoint: A Hugging Face folder.
        shapes: Shapes of dense weights that stand packed in a tensor, by its name; others have their own.

    Raises:
        LayerError: It is a bare file, which does not say what its tensors are.
        SourceError: transformers is not installed, or knows no such model.
        FormatError: The tensors are not those of the model.
    """
    if checkpoint.config is None:
        raise LayerError(
            f"{checkpoint.path} does not say which kinds of layers its tensors belong to",
            got=f"{len(checkpoint.entries)} tensors without a config.json beside them",
            wanted="a Hugging Face folder: config.json and its weights",
            remedy="name the weights and their axis; an embedding and Hugging Face's Conv1D look like a Linear",
        )
    model = empty_model(checkpoint.config.parent)
    wanted = {name: tuple(value.shape) for name, value in _named(model)}
    rename = _renaming(model, wanted)
    parameters: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for entry in checkpoint.entries.values():
        name, reason = rename(entry.name)
        if reason is None and name in wanted:
            shape = (shapes or {}).get(entry.name, entry.shape)
            if shape != wanted[name]:
                raise FormatError(
                    f"config.json and the weights of {checkpoint.path} disagree",
                    got=f"`{entry.name}` of {entry.file.name} is {shape}",
                    wanted=f"{wanted[name]}, the shape of `{name}` by config.json",
                    remedy="put the config.json beside the weights that they were saved with",
                )
            parameters[entry.name] = name
        else:
            unknown[entry.name] = reason or "the model that config.json describes has no such parameter"
    if not parameters:
        raise FormatError(
            f"config.json and the weights of {checkpoint.path} belong to different models",
            got=f"tensors such as {', '.join(list(unknown)[:3])}",
            wanted=f"parameters of {type(model).__name__}, such as {', '.join(list(wanted)[:3])}",
            remedy="put the config.json beside the weights that they were saved with",
        )
    return Structure(model, parameters, unknown)


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


Renaming = Callable[[str], tuple[str, str | None]]


def _renaming(model: nn.Module, known: Mapping[str, Any]) -> Renaming:
    """Return what maps a file's name to a parameter's, or gives a reason why it is none."""
    prefix = getattr(model, "base_model_prefix", "")
    convert = _conversions(model)

    def rename(stored: str) -> tuple[str, str | None]:
        name, converted = convert(stored)
        if converted:
            return name, f"transformers computes `{name}` from it when loading, so its axis there is another"
        for candidate in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.") if prefix else name):
            if candidate in known:
                return candidate, None
        return name, None

    return rename


def _conversions(model: Any) -> Callable[[str], tuple[str, bool]]:
    """Return transformers' own renamings of a checkpoint's names; releases before 5 have none for weights of layers."""
    try:
        from transformers import conversion_mapping, core_model_loading  # pyright: ignore[reportMissingImports]
    except ImportError:
        return lambda name: (name, False)
    found = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [one for one in found if isinstance(one, core_model_loading.WeightRenaming)]
    converters = [one for one in found if isinstance(one, core_model_loading.WeightConverter)]

    def convert(name: str) -> tuple[str, bool]:
        renamed, pattern = core_model_loading.rename_source_key(name, renamings, converters)
        return renamed, pattern is not None

    return convert
