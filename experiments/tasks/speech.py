"""Spoken digits (FSDD) with a network of convolutions over time, trained here from three seeds."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from tasks.base import Batches, Metric, Task, accuracy
from twofour.demo.data import data_folder

RATE, WINDOW, HOP, BANDS, FRAMES = 8000, 256, 128, 32, 64


class Speech(Task):
    """Log-mel frames (32 bands, 16 ms apart) through three Conv1d layers, the mean over time, a classifier."""

    name = "speech"
    title = "Free Spoken Digit Dataset, Conv1d over 32 mel bands"
    notes = (
        "2,700 clips of six speakers, the official split; each training has {epochs} epochs (AdamW 2e-3, weight "
        "decay 0.05, batch 50, one cycle, random shifts). The classifier stays dense (ASP's rule)."
    )
    pretrained = False
    epochs = 15

    @property
    def metric(self) -> Metric:
        """Top-1 accuracy."""
        return Metric("accuracy", "%", True, len(self.parts[1][1]), "clips")

    @cached_property
    def parts(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Training and test: log-mel features (n, bands, frames) and labels."""
        with np.load(data_folder() / "fsdd" / "fsdd.npz", allow_pickle=False) as file:
            clips = np.split(file["samples"], file["offsets"][1:-1])
            labels, held = torch.from_numpy(file["label"].astype(np.int64)), torch.from_numpy(file["is_test"])
        features = torch.stack([_log_mel(torch.from_numpy(clip.astype(np.float32) / 32768)) for clip in clips])
        mean, deviation = features[~held].mean(), features[~held].std()
        features = (features - mean) / deviation
        return (features[~held], labels[~held]), (features[held], labels[held])

    def network(self, seed: int) -> nn.Module:
        """Random weights."""
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in ((BANDS, 96), (96, 96), (96, 96)):
            layers += [nn.Conv1d(inputs, outputs, 5, padding=2, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
            layers += [nn.MaxPool1d(2)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(96, 10))

    def loader(self, seed: int) -> Batches:
        """Batches of 50, each clip shifted by up to eight frames."""
        return Batches(len(self.parts[0][1]), 50, self._batch)

    def _batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        features, labels = self.parts[0][0][index], self.parts[0][1][index]
        shift = torch.randint(-8, 9, (len(index), 1))
        frames = (torch.arange(FRAMES) + shift).clamp(0, FRAMES - 1)
        return features.gather(2, frames[:, None].expand(-1, BANDS, -1)), labels

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(output, target)

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """AdamW."""
        return AdamW(parameters, lr=2e-3, weight_decay=0.05)

    def evaluate(self, model: nn.Module) -> float:
        """Accuracy on the 300 test clips."""
        return accuracy(model, *self.parts[1])

    def calibration(self) -> list[Any]:
        """500 training clips."""
        return list(self.parts[0][0][:500].split(50))

    def example(self) -> Tensor:
        """Two test clips."""
        return self.parts[1][0][:2]


def _log_mel(samples: Tensor) -> Tensor:
    """(samples,) -> (bands, frames): powers of a Hann-windowed Fourier transform through triangles on the mel scale."""
    spectrum = torch.stft(samples, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True).abs() ** 2
    bands = (_mel_triangles() @ spectrum + 1e-6).log()
    return F.pad(bands[:, :FRAMES], (0, max(0, FRAMES - bands.shape[1])), value=math.log(1e-6))


def _mel_triangles() -> Tensor:
    """(bands, WINDOW / 2 + 1); mel = 2595 log10(1 + f / 700), O'Shaughnessy 1987."""
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, BANDS + 2) / 2595) - 1)
    hertz = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return torch.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clamp(min=0)
