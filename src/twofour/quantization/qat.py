"""Quantisation-aware training after sparsity: train with the rounding that `compile(dtype="int8" | "int4")` will do.

Rounding after training alone (PTQ) is `compile(..., dtype="int8", data=loader)`. Where it costs too much, train some
epochs with it: weights and inputs are rounded in the forward pass, gradients pass straight through (Jacob et al. 2018,
arXiv 1712.05877). The order is that of the sparse workflow: sparsity first, then low bits under fixed masks (Mishra et
al. 2021, section 5). Scales are symmetric or have an exact zero, so a pruned value stays exactly zero.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from twofour.errors import MaskError, TrainingError
from twofour.kernels.nm_matmul import quantize_input
from twofour.masks import Mask
from twofour.packing import encodings
from twofour.packing.encodings import Encoding, dequantize
from twofour.quantization.straight_through import straight
from twofour.training.schemes import Slot, require_free
from twofour.training.schemes.over_masks import OverMasks, fitting


def attach(
    model: nn.Module,
    dtype: Literal["int8", "int4"] = "int8",
    *,
    activations: bool = True,
    group: int = 64,
    symmetric: bool = True,
    layers: str = "*",
) -> QAT:
    """Round weights and inputs of the masked Linear layers from now on; train on with your own loop, then `finish()`.

    Build the optimiser afterwards or before: the parameters stay the same objects.

    Args:
        model: A masked model, from `twofour.prune`.
        dtype: "int8": one scale per output channel; "int4": one per `group` inputs.
        activations: Round the inputs too, in int8: u8 with a range per token, as the kernels do without `data`.
        group: int4: inputs that share a scale, as in `compile`.
        symmetric: int4: no zero points, as in `compile`.
        layers: Glob of the layers to round.

    Example:
        >>> scheme = twofour.quantization.attach(model, "int8")
        >>> ...  # a few epochs, at a small learning rate
        >>> fast = twofour.compile(scheme.finish(), example, dtype="int8")

    Raises:
        TrainingError: The model has no masked Linear layer that fits, a training scheme is attached to it, or the
            options are impossible.
    """
    require_free(model)
    encoding = encodings.find(dtype)
    if encoding is None or not encoding.scaled or (encoding.groups and group not in encoding.groups):
        raise TrainingError(
            "the quantisation is impossible",
            got=f"dtype={dtype!r}, group={group}",
            wanted=f'"int8", or "int4" with a group of {", ".join(map(str, encodings.GROUPS))}',
            remedy='dtype="int8" first: it loses less',
        )
    group = group if encoding.groups else 0
    wanted = "a masked Linear layer"
    found = fitting(model, layers, lambda mask: _unfit(mask, dtype, group), verb="quantise", wanted=wanted)
    return QAT(model, found, encoding, activations and encoding.rounds_inputs, group, symmetric)


def _unfit(mask: Mask, dtype: str, group: int) -> str | None:
    if not isinstance(mask.module, nn.Linear):
        return f"{type(mask.module).__name__} has no {dtype} kernel"
    if group and mask.keep.shape[1] % group:
        return f"{mask.keep.shape[1]} inputs are not a multiple of the group {group}"
    return None


class QAT(OverMasks):
    """Rounding that is attached to a model.

    Attributes:
        dtype: "int8" or "int4".
    """

    def __init__(
        self,
        model: nn.Module,
        found: dict[str, Mask],
        encoding: Encoding,
        activations: bool,
        group: int,
        symmetric: bool,
    ) -> None:
        self.dtype = encoding.name
        self._keeps = {name: mask.keep.clone() for name, mask in found.items()}
        roundings = [_Rounding(mask.keep, encoding, group, symmetric) for mask in found.values()]
        modules = [mask.module for mask in found.values() if activations]
        super().__init__(model, "quantisation-aware training", found, roundings)
        self._handles = [module.register_forward_pre_hook(_round_inputs, with_kwargs=True) for module in modules]

    def finish(self) -> nn.Module:
        """Make the model plain and masked as before, its weights as they were trained; see `Scheme.finish`.

        They are not rounded: `compile` and `packing.pack` round them as training did, given the same dtype, group and
        symmetry. Rounded here, asymmetric int4 would find another range the second time, and training on would have
        lost what the optimiser knew between two steps of the grid.

        Raises:
            MaskError: A rounded weight has values outside its mask; the scheme stays attached.
        """
        self._require_attached()
        if broken := [name for name, slot in zip(self.layers, self._slots, strict=True) if self._outside(name, slot)]:
            raise MaskError(
                "rounding broke the sparsity",
                got=f"values outside the mask of {', '.join(broken)}",
                wanted="exact zeros there: was a weight or its rounding replaced while the scheme was attached?",
                remedy="scheme.remove() takes the rounding off and applies the masks to the weights again",
            )
        return self.remove()

    def remove(self) -> nn.Module:
        """Stop rounding; the weights are as the optimiser left them, under their masks. See `Scheme.remove`."""
        self._take_off(parametrised=False)
        for handle in self._handles:
            handle.remove()
        return self.model

    def _outside(self, name: str, slot: Slot) -> bool:
        rounded = getattr(slot.module, slot.attribute).detach()
        return bool((rounded.masked_fill(self._keeps[name], 0) != 0).any())


class _Rounding(nn.Module):
    keep: Tensor

    def __init__(self, keep: Tensor, encoding: Encoding, group: int, symmetric: bool) -> None:
        super().__init__()
        self.register_buffer("keep", keep.clone(), persistent=False)
        self.encoding, self.group, self.symmetric = encoding, group, symmetric

    def forward(self, weight: Tensor) -> Tensor:
        """Weight (out, in) -> the same rounded, with the gradient of the mask alone."""
        return straight(weight.masked_fill(~self.keep, 0), self.rounded)

    def rounded(self, kept: Tensor) -> Tensor:
        """What the packed weight will hold: the scales of kept values are those of whole rows, zeros add nothing."""
        whole, scales, zeros = self.encoding.quantize(kept.float(), self.group, self.symmetric)
        assert scales is not None, self.encoding
        return dequantize(whole, scales, zeros).to(kept.dtype)


def _round_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (_rounded_tokens(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": _rounded_tokens(kwargs["input"])}


def _rounded_tokens(x: Tensor) -> Tensor:
    return straight(x, _nearest_tokens)


def _nearest_tokens(x: Tensor) -> Tensor:
    whole, scale, zero = quantize_input(x.reshape(-1, x.shape[-1]).float())
    return ((whole.float() - zero) * scale).to(x.dtype).view_as(x)
