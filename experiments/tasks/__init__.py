"""The tasks of the results page, by name."""

from tasks.base import Metric, Task
from tasks.cifar10 import Cifar10
from tasks.fashion import Fashion
from tasks.resnet9 import GradientsCifar10, GradientsCifar10Short
from tasks.speech import Speech
from tasks.sst2 import Sst2, Sst2Pretrained
from tasks.stories import Stories
from tasks.stsb import Stsb
from tasks.wikitext import GradientsWikiText, WikiText

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Cifar10, Fashion, Speech, Stsb, Sst2, Sst2Pretrained, WikiText, Stories)
}
GRADIENTS: dict[str, type[Task]] = {
    task.name: task for task in (GradientsCifar10, GradientsCifar10Short, GradientsWikiText)
}
"""Trainings from scratch in which dL/dz is pruned."""

__all__ = ["GRADIENTS", "TASKS", "Metric", "Task"]
