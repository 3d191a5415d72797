"""Where a pattern may go: the weights of a model that can be pruned, each with the axis its product sums over."""

from twofour.layers.axis import Reduction
from twofour.layers.compiled import CompiledLayer, compilation, compiled_parts, mark_compiled
from twofour.layers.globs import (
    ELIGIBILITIES,
    matches,
    nearest,
    parse_globs,
    require_eligibility,
    require_matches,
    require_module,
)
from twofour.layers.kinds import KINDS, SUPPORTED, Feed, Kind, is_hugging_face_conv1d, kind_of
from twofour.layers.reasons import DTYPES, way_out
from twofour.layers.schemes import MASKED, attached, describe_attached, describe_schemes, hold, is_masked, let_go
from twofour.layers.sharded import is_distributed, local, placed, whole
from twofour.layers.walk import Skipped, Walk, reduction_axes, walk
from twofour.layers.weight import PrunableWeight

__all__ = [
    "DTYPES",
    "ELIGIBILITIES",
    "KINDS",
    "MASKED",
    "SUPPORTED",
    "CompiledLayer",
    "Feed",
    "Kind",
    "PrunableWeight",
    "Reduction",
    "Skipped",
    "Walk",
    "attached",
    "compilation",
    "compiled_parts",
    "describe_attached",
    "describe_schemes",
    "hold",
    "is_distributed",
    "is_hugging_face_conv1d",
    "is_masked",
    "kind_of",
    "let_go",
    "local",
    "mark_compiled",
    "matches",
    "nearest",
    "parse_globs",
    "placed",
    "reduction_axes",
    "require_eligibility",
    "require_matches",
    "require_module",
    "walk",
    "way_out",
    "whole",
]
