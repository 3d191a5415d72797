"""What transformers' `generate` brings to a compiled decoder: caches of keys, and the loop from token to token."""

from twofour.generation.loop import Generation, Steps, own_method

__all__ = ["Generation", "Steps", "own_method"]
