"""One-shot pruning of checkpoints on disk, tensor by tensor: what is in memory is a part of one tensor."""

from twofour.streaming.checkpoint_plan import Plan, Sparse, plan_file, plan_folder
from twofour.streaming.prune import prune
from twofour.streaming.report import Report
from twofour.streaming.shard import Outcome

__all__ = ["Outcome", "Plan", "Report", "Sparse", "plan_file", "plan_folder", "prune"]
