"""Ways to become sparse while training, beside the paper's workflow: each has `attach`, `finish` and `remove`.

A scheme of one's own derives from `Scheme` and puts its parametrisations into `Slot`s.
"""

from twofour.training.schemes import block_thresholds, channel_thresholds, gates, gradual, lora, s_ste, sr_ste
from twofour.training.schemes.base import Scheme, require_free
from twofour.training.schemes.slots import Slot, parametrise_all, tied

__all__ = [
    "Scheme",
    "Slot",
    "block_thresholds",
    "channel_thresholds",
    "gates",
    "gradual",
    "lora",
    "parametrise_all",
    "require_free",
    "s_ste",
    "sr_ste",
    "tied",
]
