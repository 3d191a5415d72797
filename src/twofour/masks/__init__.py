"""The Mask: a weight that stays sparse through training, with torch's own hooks and nothing wrapped or patched."""

from twofour.masks.checkpoint import derive, load_state_dict, state_dict
from twofour.masks.mask import Mask, attach, attach_all, detach, enforce, of

__all__ = [
    "Mask",
    "attach",
    "attach_all",
    "derive",
    "detach",
    "enforce",
    "load_state_dict",
    "of",
    "state_dict",
]
