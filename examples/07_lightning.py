"""Lightning: a callback that prunes before training, keeps masks in the checkpoints, and checks the end."""

import pytorch_lightning as lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import twofour


class Sparse(lightning.Callback):
    """2:4 from the first step to the last."""

    def on_fit_start(self, trainer, module):
        """Prune, unless a checkpoint has brought masks."""
        if not twofour.masks.of(module):
            twofour.prune(module, "2:4")

    def on_save_checkpoint(self, trainer, module, checkpoint):
        """Store the masks beside the weights."""
        checkpoint["twofour_masks"] = twofour.masks.state_dict(module)

    def on_load_checkpoint(self, trainer, module, checkpoint):
        """Attach the stored masks before training goes on."""
        twofour.masks.load_state_dict(module, checkpoint["twofour_masks"])

    def on_fit_end(self, trainer, module):
        """Refuse to hand over a model that is not sparse."""
        assert twofour.check(module).ok


class Digits(lightning.LightningModule):
    """A perceptron; nothing here knows of sparsity."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, _):
        """Return the loss of one batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.01)


lightning.seed_everything(0, verbose=False)
x, y = (torch.tensor(part) for part in (load_digits().data / 16, load_digits().target))
loader = DataLoader(TensorDataset(x[:1400].float(), y[:1400]), batch_size=100, shuffle=True)
quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
model = Digits()
lightning.Trainer(max_epochs=8, callbacks=[Sparse()], enable_checkpointing=False, **quiet).fit(model, loader)
right = (model.net(x[1400:].float()).argmax(1) == y[1400:]).float().mean().item()
print(f"{len(twofour.masks.of(model))} weights 2:4, {100 * right:.1f} % right")
