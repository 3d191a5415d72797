"""Legality: is what was promised as sparse really sparse, along the right axis, and which runtime could use it."""

from __future__ import annotations

from twofour.legality.examine import check, check_weights
from twofour.legality.report import Finding, Report
from twofour.legality.rules import RULES, Fit, Rule
from twofour.legality.subject import KINDS

__all__ = ["KINDS", "RULES", "Finding", "Fit", "Report", "Rule", "check", "check_weights"]
