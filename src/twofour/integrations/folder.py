"""Our packed folder in `from_pretrained`: transformers builds the model without values, and `twofour.load` fills it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers.utils.logging import is_progress_bar_enabled

import twofour
from twofour import native
from twofour.checkpoints import INDEX, WEIGHTS
from twofour.compiler.compilation import KIND
from twofour.errors import CompileError, FormatError
from twofour.export.metadata import KEY, Description, read_description
from twofour.integrations.config import TwoFourConfig
from twofour.integrations.loading import own_dtype

logger = logging.getLogger("twofour.integrations")

UNEXPECTED, TIED = "_keys_to_ignore_on_load_unexpected", "all_tied_weights_keys"
"""Attributes of a model of transformers: names in a file that it passes by, and names that are one parameter."""


@dataclass(eq=False)
class Packed:
    """A packed folder, or one of a compiled model without zeros, while its model is built.

    Attributes:
        path: Its file, or the folder with several.
        settings: What its files say of the model.
        empty: The model as it was built, on the meta device.
        kept: What the model says to transformers of its checkpoints, which is put aside meanwhile.
    """

    path: Path
    settings: dict[str, Any]
    empty: nn.Module
    kept: dict[str, Any]

    @classmethod
    def found(cls, model: Any, files: Sequence[str] | None, config: TwoFourConfig) -> Packed | None:
        """Take the packed layers out of a model that was just built; None, and nothing done, for any other folder.

        transformers would fill them with new random weights: it knows no name of the packed ones. A compiled model
        whose weights are all dense has none, and is one of ours where nothing else is asked for than what it holds.

        Args:
            model: On the meta device; it loses its packed layers until `loaded`.
            files: The files with its weights, where transformers says which.
            config: What is asked for.

        Raises:
            FormatError: What a file says of itself is malformed, or names a layer that the model does not have.
        """
        paths = [Path(file) for file in files] if files else _files(model)
        described = [found for path in paths if (found := _described(path)) is not None]
        if not any(part.packed for part in described) and not (described and _is_dense(described[0].settings, config)):
            return None
        found = cls(
            paths[0] if len(paths) == 1 else paths[0].parent,
            dict(described[0].settings),
            copy.deepcopy(model, {id(config): config for config in configs_of(model)}),
            {name: getattr(model, name) for name in (UNEXPECTED, TIED) if hasattr(model, name)},
        )
        packed = {name for part in described for name in part.packed}
        packed |= {alias for part in described for alias, name in part.aliases.items() if name in packed}
        for name in sorted(packed):
            found._take_out(model, name)
        for module in model.modules():  # nothing is missing, and initialising a block may read its layers' weights
            module._is_hf_initialized = True
        kind = set if isinstance(found.kept[UNEXPECTED], set) else list  # of transformers 5 and 4
        setattr(model, UNEXPECTED, kind([".*"]))  # `load` accounts for every tensor
        if TIED in found.kept:
            setattr(model, TIED, {one: other for one, other in found.kept[TIED].items() if not {one, other} & packed})
        return found

    def _take_out(self, model: Any, weight: str) -> None:
        """Put a module without parameters in the place of the layer of a weight."""
        layer = weight.rpartition(".")[0]
        owner, _, leaf = layer.rpartition(".")
        try:
            parent = model.get_submodule(owner)
            old = parent.get_submodule(leaf)
        except AttributeError as error:
            wanted = " or ".join(model.config.architectures or ()) or "the class that it was saved from"
            raise FormatError(
                "the packed folder is of another class",
                got=f"{self.path}: the layer `{layer}`, which {type(model).__name__} does not have",
                wanted=wanted,
                remedy=f"load it with {wanted}.from_pretrained; plain weights (packed=False) fit other heads too",
            ) from error
        if isinstance(old, nn.Embedding):  # tied to a packed weight; transformers asks for it by its class
            old.register_parameter("weight", None)
        else:
            setattr(parent, leaf, nn.Identity())

    @property
    def names(self) -> list[str] | None:
        """The arguments that the graph of the file was captured with, None where it has none."""
        place: Any = self.settings
        for key in ("graph", "inputs", "dict"):
            place = place.get(key) if isinstance(place, dict) else None
        return [*place] if isinstance(place, dict) else None

    def loaded(self, model: Any, config: TwoFourConfig, example: Any) -> nn.Module:
        """Free what `model` holds and return the compiled model of the folder; dense weights are never in memory.

        Raises:
            FormatError: The folder is damaged or does not fit the model.
            CompileError: It was compiled for another computing type than is asked for, or is to be pruned.
        """
        vars(model).update(self.kept)
        if config.prune is not None:
            raise CompileError(
                "a packed folder is sparse already",
                got=f"{self.path} with prune={config.prune!r}",
                wanted="TwoFourConfig() without prune",
                remedy="prune the dense model that it was made of",
            )
        model._modules.clear()
        native.release_free_memory()
        own, tables = self.settings.get("dtype"), self.settings.get("embeddings") or None
        other, others = config.dtype not in (None, own), config.embeddings not in (None, tables)
        if not other and not others:
            return self._compiled(config, example)
        if own is not None:
            what, asked, held = (
                ("computing type", config.dtype, own) if other else ("type of embeddings", config.embeddings, tables)
            )
            name = "dtype" if other else "embeddings"
            raise CompileError(
                f"the packed folder was compiled for another {what}",
                got=f"{name}={asked!r}; {self.path} holds {held or 'them as the model has them'}",
                wanted=f"{name}={held!r}, or none",
                remedy="load the plain folder, with zeros or dense, for another type",
            )
        masked = twofour.load(self.path, self.empty, masked=True)
        options: dict[str, Any] = {"memory": config.memory or "fast", "graph": config.graph}
        options |= {"embeddings": config.embeddings} | ({} if is_progress_bar_enabled() else {"progress": False})
        return twofour.compile(masked, example, config.dtype or own_dtype(masked), **options)

    def _compiled(self, config: TwoFourConfig, example: Any) -> nn.Module:
        load = partial(twofour.load, self.path, self.empty, memory=config.memory, graph=config.graph)
        try:
            return load(example=example)
        except CompileError as error:
            if example is None:
                raise
            logger.warning("the example is left out: %s", error.what)
            return load()


def _described(path: Path) -> Description | None:
    """Return what a file of ours says of itself, None of any other."""
    if path.suffix != ".safetensors":
        return None
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get(KEY)
    return None if text is None else read_description(path, text)


def _is_dense(settings: Mapping[str, Any], config: TwoFourConfig) -> bool:
    """Tell whether a file is of a compiled model without zeros, as it is wanted: its graph and times serve then."""
    asked = config.prune is not None or config.dtype not in (None, settings.get("dtype"))
    asked |= config.embeddings not in (None, settings.get("embeddings"))
    return settings.get("kind") == KIND and not settings.get("patterns") and not asked


def _files(model: Any) -> list[Path]:
    """Return the files with a model's weights, of its folder or the hub's cache: transformers 4 does not say them."""
    from transformers.utils.hub import cached_file

    name, revision = model.config.name_or_path, getattr(model.config, "_commit_hash", None)
    for file in (WEIGHTS, INDEX):
        found = cached_file(
            name, file, revision=revision, local_files_only=True, _raise_exceptions_for_missing_entries=False
        )
        if found is not None:
            path = Path(found)
            return [path] if file == WEIGHTS else sorted(path.parent.glob("*.safetensors"))
    return []


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configurations that modules of a model hold."""
    return [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
