"""Legality: is what was promised as sparse really sparse, along the right axis, and which runtime could use it."""

from __future__ import annotations

from twofour.legality.examine import KINDS, check, check_weights
from twofour.legality.report import Finding, Report
from twofour.legality.rules import RULES, Fit, Rule

__all__ = ["KINDS", "RULES", "Finding", "Fit", "Report", "Rule", "check", "check_weights"]
