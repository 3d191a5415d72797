"""What transformers' `generate` brings to a compiled decoder: caches of keys, and the loop from token to token."""

from twofour.generation.loop import LEFT, SERVED, Generation, Steps, left_out

__all__ = ["LEFT", "SERVED", "Generation", "Steps", "left_out"]
