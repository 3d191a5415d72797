"""Where a pattern may go: the weights of a model that can be pruned, each with the axis its product sums over."""

from twofour.layers.attachments import (
    CARRIED,
    MASKED,
    STORED,
    Attachment,
    attached,
    describe_attached,
    describe_schemes,
    describe_stored,
    is_masked,
    put_over,
    require_finished,
    stored_shape,
    take_off,
)
from twofour.layers.axis import Reduction
from twofour.layers.compiled import CompiledLayer, apply_or_refuse, compilation, compiled_parts, mark_compiled
from twofour.layers.globs import (
    ELIGIBILITIES,
    matches,
    nearest,
    parse_globs,
    require_eligibility,
    require_matches,
    require_module,
    require_unwrapped,
)
from twofour.layers.kinds import KINDS, SUPPORTED, Feed, Kind, is_hugging_face_conv1d, kind_of
from twofour.layers.reasons import DTYPES, dtype_reason, obstacle, remedy_for
from twofour.layers.sharded import full_tensor, is_distributed, local, placed
from twofour.layers.walk import Skipped, Walk, reduction_axes, walk
from twofour.layers.weight import PrunableWeight

__all__ = [
    "CARRIED",
    "DTYPES",
    "ELIGIBILITIES",
    "KINDS",
    "MASKED",
    "STORED",
    "SUPPORTED",
    "Attachment",
    "CompiledLayer",
    "Feed",
    "Kind",
    "PrunableWeight",
    "Reduction",
    "Skipped",
    "Walk",
    "apply_or_refuse",
    "attached",
    "compilation",
    "compiled_parts",
    "describe_attached",
    "describe_schemes",
    "describe_stored",
    "dtype_reason",
    "full_tensor",
    "is_distributed",
    "is_hugging_face_conv1d",
    "is_masked",
    "kind_of",
    "local",
    "mark_compiled",
    "matches",
    "nearest",
    "obstacle",
    "parse_globs",
    "placed",
    "put_over",
    "reduction_axes",
    "remedy_for",
    "require_eligibility",
    "require_finished",
    "require_matches",
    "require_module",
    "require_unwrapped",
    "stored_shape",
    "take_off",
    "walk",
]
