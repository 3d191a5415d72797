"""The tasks of the results page, by name."""

from collections.abc import Callable
from functools import partial

from tasks.base import Metric, Task
from tasks.char_gpt import ShakespeareGpt
from tasks.characters import ShakespeareGru, ShakespeareLstm, WikiTextGru, WikiTextLstm
from tasks.cifar10 import Cifar10, LowBitsCifar10
from tasks.convnets import SOURCES, ConvNet
from tasks.digits import DigitsGru
from tasks.fashion import Fashion
from tasks.long import LongCifar10, LongSst2, LongStsb, LongWikiText
from tasks.recurrent import Recurrent
from tasks.resnet9 import GradientsCifar10, GradientsCifar10Short
from tasks.speech import Speech
from tasks.sst2 import Sst2, Sst2Pretrained
from tasks.stories import Stories
from tasks.stsb import ShrinkStsb, Stsb
from tasks.vgg import ShrinkCifar10
from tasks.wide import ShrinkFashion
from tasks.wikitext import GradientsWikiText, WikiText
from twofour.demo.convnets import NETS

_SHORT = (Cifar10, Fashion, Speech, Stsb, Sst2, Sst2Pretrained, WikiText, Stories)
_LONG = (LongCifar10, LongStsb, LongSst2, LongWikiText)
TASKS: dict[str, type[Task]] = {task.name: task for task in (*_SHORT, *_LONG)}
LOW_BITS: dict[str, type[Task]] = {task.name: task for task in (*_SHORT, LowBitsCifar10, ShakespeareGpt)}
"""Nets that are trained in few bits."""
CONVNETS: dict[str, Callable[[], ConvNet]] = {
    f"{source}-{net}": partial(ConvNet, source, net) for source in SOURCES for net in NETS
}
"""Those of them that a GPU trains."""
GRADIENTS: dict[str, type[Task]] = {
    task.name: task for task in (GradientsCifar10, GradientsCifar10Short, GradientsWikiText)
}
"""Trainings from scratch in which dL/dz is pruned."""
BLOCKS: dict[str, type[Recurrent]] = {
    task.name: task for task in (ShakespeareGru, ShakespeareLstm, DigitsGru, WikiTextGru, WikiTextLstm)
}
"""Recurrent nets that lose blocks while they train."""

SHRINK: dict[str, type[Task]] = {task.name: task for task in (ShrinkFashion, ShrinkCifar10, ShrinkStsb)}
"""Nets that lose channels."""

__all__ = ["BLOCKS", "CONVNETS", "GRADIENTS", "LOW_BITS", "SHRINK", "TASKS", "ConvNet", "Metric", "Recurrent", "Task"]
