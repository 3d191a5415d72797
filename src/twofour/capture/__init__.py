"""capture: a model's forward as a graph of torch operators, and which calls that graph holds for."""

from twofour.capture.call import alike, arguments, bind, is_hugging_face, said_by_config
from twofour.capture.forward import (
    KEPT,
    TRACING,
    Graph,
    Structure,
    attribute,
    capture,
    outside_tracing,
)
from twofour.capture.guard import Guard
from twofour.capture.in_place import changes_in_place
from twofour.capture.quiet import without_torchs_log

__all__ = [
    "KEPT",
    "TRACING",
    "Graph",
    "Guard",
    "Structure",
    "alike",
    "arguments",
    "attribute",
    "bind",
    "capture",
    "changes_in_place",
    "is_hugging_face",
    "outside_tracing",
    "said_by_config",
    "without_torchs_log",
]
