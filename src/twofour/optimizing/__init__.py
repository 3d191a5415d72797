"""optimizing: a dense model and data of the user's in, the fastest model whose quality holds out, measured."""

from twofour.optimizing.bench import bench
from twofour.optimizing.optimize import optimize
from twofour.optimizing.outcome import Outcome
from twofour.optimizing.pairs import Pairs

__all__ = ["Outcome", "Pairs", "bench", "optimize"]
