"""One-shot pruning of checkpoints on disk, tensor by tensor: what is in memory is a part of one tensor."""

from twofour.streaming.checkpoint_plan import Plan, Sparse, plan_file, plan_folder
from twofour.streaming.cluster import run_on_cluster
from twofour.streaming.journal import Journal
from twofour.streaming.prune import NOTE, prune
from twofour.streaming.report import Report
from twofour.streaming.shard import Outcome, Shard, Written, write_shard

__all__ = [
    "NOTE",
    "Journal",
    "Outcome",
    "Plan",
    "Report",
    "Shard",
    "Sparse",
    "Written",
    "plan_file",
    "plan_folder",
    "prune",
    "run_on_cluster",
    "write_shard",
]
