"""Checker: is what was promised as sparse really sparse, along the right axis, and which runtime could use it."""

from twofour.checker.check import Report, check, check_weights
from twofour.checker.judge import Finding
from twofour.checker.runtimes import RULES, Fit, Rule
from twofour.checker.weights import KINDS

__all__ = ["KINDS", "RULES", "Finding", "Fit", "Report", "Rule", "check", "check_weights"]
