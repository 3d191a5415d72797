"""Kept values solved together after pruning, so that blocks and the whole model answer as the dense ones did."""

from twofour.reconstruction.reconstruct import Reconstruct, Report, prepared, reconstruct, require_asked, require_dense

__all__ = ["Reconstruct", "Report", "prepared", "reconstruct", "require_asked", "require_dense"]
