"""Training a masked model again, with a control, and going on after an interruption; other ways to become sparse."""

from twofour.training import both_ways, sdgp
from twofour.training.clipping import clipped_step
from twofour.training.distillation import Hidden, Taught, distilled
from twofour.training.finetune import finetune, train
from twofour.training.result import Epoch, Result, Run
from twofour.training.schemes import Scheme, block_thresholds, channel_thresholds, gates, gradual, lora, s_ste, sr_ste

__all__ = [
    "Epoch",
    "Hidden",
    "Result",
    "Run",
    "Scheme",
    "Taught",
    "block_thresholds",
    "both_ways",
    "channel_thresholds",
    "clipped_step",
    "distilled",
    "finetune",
    "gates",
    "gradual",
    "lora",
    "s_ste",
    "sdgp",
    "sr_ste",
    "train",
]
