"""Weights that somebody else wrote: they bring their own zeros as the new mask, or are masked again."""

from __future__ import annotations

import logging

from torch import Tensor

from twofour.errors import PatternError
from twofour.layers import full_tensor, local, placed
from twofour.masks.rule import Rule, fill_pruned, keeps

_log = logging.getLogger("twofour.masks")


def reconcile(rule: Rule, parameter: Tensor) -> None:
    """Bring a mask and the values of its parameter together.

    Weights that obey the mask keep it. Weights that obey the pattern with other zeros bring a new mask. Others are
    masked again, with a warning. For a sharded weight every process must call this together.

    Raises:
        PatternError: Other zeros came with NaN or infinity among the values.
    """
    keep, weight = rule.on(parameter), full_tensor(parameter)
    if keeps(weight, full_tensor(keep)):
        return
    if rule.pattern.check(rule.axis.last(weight)).ok:
        _adopt(rule, keep, weight)
        return
    _log.warning("`%s`: the loaded weight is not %s; its mask was applied again", rule.name, rule.pattern.name)
    fill_pruned(parameter, keep)


def _adopt(rule: Rule, keep: Tensor, weight: Tensor) -> None:
    try:
        chosen = rule.pattern.project(rule.axis.last(weight), absolute=True)
    except PatternError as error:
        raise error.for_layer(rule.name) from None
    local(keep).copy_(local(placed(rule.axis.restore(chosen), keep)))
    _log.info("`%s`: the loaded weight is %s with other zeros; its mask follows", rule.name, rule.pattern.name)
