"""TwoFourQuantizer: what transformers calls while it loads and saves a model with our config."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from twofour import native
from twofour.compiler.adopt import adopt
from twofour.errors import CompileError
from twofour.integrations.config import METHOD
from twofour.integrations.example import example_of
from twofour.integrations.folder import Packed, configs_of
from twofour.integrations.loading import compiled
from twofour.integrations.saving import plain, save_pretrained


class TwoFourQuantizer(HfQuantizer):
    """Takes packed layers out before transformers reads the weights, and compiles the model afterwards.

    Attributes:
        quantization_config: The TwoFourConfig; `from_pretrained` takes it off the model's own configuration, whose
            `save_pretrained` would write it.
    """

    requires_calibration = False
    packed: Packed | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse a `device_map` that names anything but the CPU.

        Raises:
            CompileError: It does.
        """
        places = device_map.values() if isinstance(device_map, dict) else [device_map]
        if other := [place for place in places if place not in (None, "auto") and str(place) != "cpu"]:
            raise CompileError(
                "a model is loaded on the CPU here",
                got=f"device_map={other[0]!r}",
                wanted="no device_map",
                remedy="on a GPU load the model without TwoFourConfig and call twofour.compile(model, dtype=...)",
            )

    def update_device_map(self, device_map: Any) -> None:
        """Return none: on one device nothing is dispatched."""

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        config: Any = self.quantization_config
        self.packed = Packed.found(model, checkpoint_files, config)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config: Any = self.quantization_config
        found, self.packed = self.packed, None
        if found is None:
            fast = compiled(model, config)
        else:
            made_up = found.empty, config.batch, config.length, found.names
            example = example_of(*made_up) if config.graph else None
            fast = found.loaded(model, config, example)
        _settle(model, fast)

    def get_state_dict_and_metadata(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the dense state dict, zeros included, and the metadata that says which weights are sparse."""
        return plain(model)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Return True: `save_pretrained` writes plain or packed weights."""
        return True

    @property
    def is_trainable(self) -> bool:
        """False: kernels have no backward pass. Train the model that transformers loads without us."""
        return False


register_quantizer(METHOD)(TwoFourQuantizer)


def _settle(model: Any, fast: nn.Module) -> None:
    """Let the model that transformers returns be the compiled one, with the configuration that its parts hold."""
    adopt(model, fast)
    model.config = fast.config
    for config in configs_of(model):
        for name in ("quantization_config", "_pre_quantization_dtype"):  # the second of transformers 4
            vars(config).pop(name, None)
    native.release_free_memory()
    vars(model)["save_pretrained"] = partial(save_pretrained, model)
