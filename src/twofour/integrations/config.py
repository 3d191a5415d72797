"""TwoFourConfig: how `from_pretrained` makes a fast model of a folder, checked when it is written down."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from twofour.compiler.computing import Computing, dtype_name
from twofour.compiler.embeddings import kind_of_tables
from twofour.compiler.replaceable import require_memory_mode
from twofour.criteria import AUTO
from twofour.errors import CompileError, RecipeError, integer_from
from twofour.recipe import Recipe

logger = logging.getLogger("twofour.integrations")

METHOD = "twofour"
"""What transformers knows our config and quantizer by: `quant_method` in a config.json."""

STORED = ("dtype", "memory", "embeddings", "graph", "batch", "length")
"""Fields that a config.json carries; pruning is over when a model is saved."""


class TwoFourConfig(QuantizationConfigMixin):
    """Argument `quantization_config` of `from_pretrained`: compile what is loaded, on the CPU, for inference.

    A folder with zeros runs sparse, one that `twofour.save` packed is loaded without its dense weights in memory, and a
    dense one runs on the best dense kernels, with a warning, unless `prune` asks for zeros.

    Args:
        dtype: Computing type of the Linear layers, as in `twofour.compile`: "float32", "bfloat16", "int8", "int4".
            Default: a packed folder's own; else bfloat16 where the weights are, and float32.
        prune: A pattern such as "2:4": a dense model is pruned in one shot, by `data` where there are some. Default:
            weights are never changed.
        criterion: As in `twofour.prune`. Default: "auto", which is "admm" with data, "magnitude" without.
        data: Calibration data for `prune`: sentences, pairs of sentences, or batches as `twofour.prune` takes them.
        skip: Globs of layers that `prune` leaves dense.
        memory: "fast" or "small", as in `twofour.compile`. Default: a packed folder's own, else "fast".
        embeddings: "bfloat16" or "int8" keeps tables of embeddings so, as in `twofour.compile`. Default: a packed
            folder's own, else as the model has them.
        graph: "auto", True or False, as in `twofour.compile`.
        batch: Sequences, or images, of the example that the model is captured and timed on; other sizes run too.
        length: Tokens of each of its sequences at most.
        packed: What `save_pretrained` writes: False, plain weights with their zeros, which transformers reads without
            us; True, our packed form.
        config_key: Whether `save_pretrained` writes `quantization_config` into config.json: the folder then compiles
            itself where twofour.integrations was imported. transformers without us passes it by with a warning, vLLM
            refuses such a folder. A packed folder, which nothing else can read, always has it.

    Raises:
        CompileError: The dtype, memory, embeddings, graph or the example's size is impossible.
        RecipeError: Data, a criterion or layers to skip are given without `prune`, or are malformed.
        PatternError: `prune` is no pattern.
    """

    quant_method: Any = METHOD

    def __init__(
        self,
        dtype: str | torch.dtype | None = None,
        *,
        prune: str | None = None,
        criterion: str | None = None,
        data: Iterable[Any] | None = None,
        skip: str | Sequence[str] = (),
        memory: str | None = None,
        embeddings: str | torch.dtype | None = None,
        graph: bool | str = "auto",
        batch: int = 8,
        length: int = 32,
        packed: bool = False,
        config_key: bool = False,
    ) -> None:
        self.quant_method = METHOD
        self.dtype = None if dtype is None else Computing.of(dtype_name(dtype), "cpu").dtype
        criterion = None if criterion == AUTO else criterion  # what the data allow: see `prune`
        self.prune, self.criterion, self.data = prune, criterion, data
        self.skip = (skip,) if isinstance(skip, str) else tuple(skip)
        require_memory_mode(memory or "fast")
        self.memory, self.graph = memory, _engine(graph)
        self.embeddings = kind_of_tables(embeddings) or None
        for name, size in (("batch", batch), ("length", length)):
            integer_from(2, "the example's size is impossible", CompileError, "leave it out", **{name: size})
        self.batch, self.length = batch, length
        self.packed, self.config_key = packed, config_key
        if prune is not None:
            Recipe.parse(prune, criterion=criterion, skip=self.skip)
        elif data is not None or criterion is not None or self.skip:
            raise RecipeError(
                "there is nothing to prune by",
                got="data, criterion or skip without prune",
                wanted='TwoFourConfig(prune="2:4", data=...)',
                remedy="name the pattern, or leave them out: weights that are not pruned stay as they are",
            )

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Read what a config.json says; what another release wrote and this one does not know is named and left out."""
        known = {name: value for name, value in config_dict.items() if name in STORED and value is not None}
        unknown = sorted(config_dict.keys() - {*STORED, "quant_method", "packed", "version"})
        if unknown:
            logger.warning("quantization_config: %s not known to this release of twofour", ", ".join(unknown))
        config = cls(**known, packed=config_dict.get("packed") is True, config_key=True)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return what a config.json carries."""
        return {"quant_method": METHOD, **{name: getattr(self, name) for name in STORED}, "packed": self.packed}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the same: transformers 4 asks for what differs from the defaults."""
        return self.to_dict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the settings; data are shared: transformers copies configurations often, and a loader cannot be."""
        return copy.copy(self)


register_quantization_config(METHOD)(TwoFourConfig)  # as a decorator it would hide the class from type checkers


def _engine(graph: bool | str) -> bool | str:
    if not isinstance(graph, bool) and graph != "auto":
        raise CompileError(
            "the graph is not known here",
            got=repr(graph),
            wanted="'auto', True or False",
            remedy="leave it out; graph='inductor' is for twofour.compile alone",
        )
    return graph
