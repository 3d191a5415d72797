"""Sizes and the training recipe of the demo, one set per data set; the same recipe trains all models of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Settings:
    """Sizes of the network, the data and the training.

    Attributes:
        patch: Pixels along one side of a patch.
        width: Numbers per token.
        hidden: Width of the perceptrons' inner layers.
        layers: Layers of the transformer.
        heads: Attention heads.
        train: Training images.
        test: Held-out images.
        epochs: Epochs of each training.
        batch: Images per step.
        lr: Peak learning rate of the one-cycle schedule.
        weight_decay: Decoupled weight decay of AdamW.
        seconds: Measuring time per latency comparison.
        batches: Batch sizes whose latency is measured.
    """

    patch: int
    width: int = 256
    hidden: int = 1024
    layers: int = 2
    heads: int = 4
    train: int = 1257
    test: int = 540
    epochs: int = 10
    batch: int = 32
    lr: float = 5e-4
    weight_decay: float = 0.05
    seconds: float = 3.0
    batches: tuple[int, ...] = (1, 64)


# Both cut an image into 16 tokens: a batch of 64 images is a product over 1,024 tokens.
SETTINGS = {
    "digits": Settings(patch=2),
    "fashion-mnist": Settings(patch=7, train=12_000, test=5_000, epochs=4, batch=64),
}


def quick(settings: Settings) -> Settings:
    """The same run in a few seconds: too small for its accuracy or speed to mean anything."""
    sizes = {"width": 64, "hidden": 128, "layers": 1, "heads": 2, "train": 256, "test": 128}
    return replace(settings, **sizes, epochs=2, seconds=0.2, batches=(1, 4))
