"""Which weights matter: criteria choose the kept values of a weight, some with new values for them."""

from twofour.criteria.activation import RIA, Wanda
from twofour.criteria.admm import ADMM
from twofour.criteria.base import Criterion, Layerwise, Scored, Solution
from twofour.criteria.importance import importance
from twofour.criteria.learned import Learned
from twofour.criteria.magnitude import Magnitude
from twofour.criteria.outcome import Choice, Outcome, Solved, few_data
from twofour.criteria.parse import AUTO, NAMES, default, parse, resolve
from twofour.criteria.random import Random
from twofour.criteria.settled import LEFT, settled
from twofour.criteria.solver import (
    NO_GRADIENT,
    SAMPLES,
    require_given,
    require_unsharded,
    solve,
    solve_one,
    wanted,
)
from twofour.criteria.sparsegpt import SparseGPT, SparseGPTMask
from twofour.criteria.taylor import Taylor

__all__ = [
    "ADMM",
    "AUTO",
    "LEFT",
    "NAMES",
    "NO_GRADIENT",
    "RIA",
    "SAMPLES",
    "Choice",
    "Criterion",
    "Layerwise",
    "Learned",
    "Magnitude",
    "Outcome",
    "Random",
    "Scored",
    "Solution",
    "Solved",
    "SparseGPT",
    "SparseGPTMask",
    "Taylor",
    "Wanda",
    "default",
    "few_data",
    "importance",
    "parse",
    "require_given",
    "require_unsharded",
    "resolve",
    "settled",
    "solve",
    "solve_one",
    "wanted",
]
