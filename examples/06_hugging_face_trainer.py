"""Hugging Face Trainer: a callback prunes before the first step, keeps masks with checkpoints, checks the end."""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import twofour


class Sparse(TrainerCallback):
    """2:4 from the first step to the last; masks travel beside the Trainer's own checkpoints."""

    def on_train_begin(self, args, state, control, model=None, **_):
        """Prune, or go on with the masks of the checkpoint that is resumed."""
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "masks.pt"
        if state.global_step and saved.exists():
            twofour.masks.load_state_dict(model, torch.load(saved, weights_only=True))
        elif not twofour.masks.of(model):
            twofour.prune(model, "2:4")

    def on_save(self, args, state, control, model=None, **_):
        """Store the masks; the weights are the Trainer's business, under the dense model's names."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(twofour.masks.state_dict(model), folder / "masks.pt")

    def on_train_end(self, args, state, control, model=None, **_):
        """Refuse to hand over a model that is not sparse."""
        assert twofour.check(model).ok


class Digits(nn.Sequential):
    """A perceptron that answers as Hugging Face's models do."""

    def forward(self, pixels, labels=None):
        """Return the loss and the scores."""
        logits = super().forward(pixels)
        return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}


x, y = torch.tensor(load_digits().data / 16).float(), torch.tensor(load_digits().target)
data = [{"pixels": pixels, "labels": label} for pixels, label in zip(x, y, strict=True)]
torch.manual_seed(0)
model = Digits(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
options = {"per_device_train_batch_size": 100, "learning_rate": 2e-3, "use_cpu": True, "save_steps": 50}
options |= {"report_to": "none", "logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
with tempfile.TemporaryDirectory() as folder:
    for steps in (50, 112):  # stopped after 50 steps, then resumed from the checkpoint
        arguments = TrainingArguments(folder, max_steps=steps, **options)
        Trainer(model, arguments, train_dataset=data[:1400], callbacks=[Sparse()]).train(
            resume_from_checkpoint=steps > 50
        )
right = (model(x[1400:])["logits"].argmax(1) == y[1400:]).float().mean().item()
print(f"{len(twofour.masks.of(model))} weights 2:4, {100 * right:.1f} % right")
