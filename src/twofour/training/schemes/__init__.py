"""Ways to become sparse while training, beside the paper's workflow: each has `attach`, `finish` and `remove`."""

from twofour.training.schemes import gradual, lora, s_ste, sr_ste
from twofour.training.schemes.base import Scheme

__all__ = ["Scheme", "gradual", "lora", "s_ste", "sr_ste"]
