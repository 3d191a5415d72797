"""Activations, their gradients and gates, one pass each, where no product does them on its way."""

from twofour.kernels.activation.cpu import DTYPES, activation, activation_gradient, gated_activation

__all__ = ["DTYPES", "activation", "activation_gradient", "gated_activation"]
