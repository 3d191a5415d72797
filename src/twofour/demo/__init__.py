"""The whole pipeline once through on real data, in one to four minutes."""

from twofour.demo.summary import Summary
from twofour.demo.workflow import demo

__all__ = ["Summary", "demo"]
