"""A captured graph as plain data: what a saved model carries, and the graph of it on the machine that loads it.

docs/formats.md has the format. What is read is a stranger's: it names operators of the table in `graph/operators.py`,
weights and layers of the model and nothing else, and every size in it is computed again by running the operators on
tensors without values.
"""

from twofour.graph.stored.code import differences, fingerprint, settings
from twofour.graph.stored.describe import describe
from twofour.graph.stored.rebuild import Rebuilt, rebuild
from twofour.graph.stored.values import UnfitError

__all__ = ["Rebuilt", "UnfitError", "describe", "differences", "fingerprint", "rebuild", "settings"]
