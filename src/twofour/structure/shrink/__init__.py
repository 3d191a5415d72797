"""shrink: fewer channels and layers: what can be cut, a plan of what stays, and the smaller model."""

from twofour.structure.shrink.absorb import absorbed
from twofour.structure.shrink.agreement import verify
from twofour.structure.shrink.channels import Channels, Cuttable, Uncut
from twofour.structure.shrink.config import NO_CONFIGURATION, configure
from twofour.structure.shrink.cut import AttributeCut, AxisCut, Cut
from twofour.structure.shrink.surgery import cut, cuts_of, masked
from twofour.structure.shrink.trial import channels

__all__ = [
    "NO_CONFIGURATION",
    "AttributeCut",
    "AxisCut",
    "Channels",
    "Cut",
    "Cuttable",
    "Uncut",
    "absorbed",
    "channels",
    "configure",
    "cut",
    "cuts_of",
    "masked",
    "verify",
]
