"""Training a masked model again, with a control, and going on after an interruption."""

from twofour.training.finetune import finetune, train
from twofour.training.result import Epoch, Result, Run

__all__ = ["Epoch", "Result", "Run", "finetune", "train"]
