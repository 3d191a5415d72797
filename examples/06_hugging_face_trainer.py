"""Hugging Face Trainer: a callback that prunes before the first step, keeps masks with checkpoints, and checks the end."""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

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
        report = twofour.check(model)
        assert report.ok, report


digits = load_digits()  # an image is a sentence of 64 words, a grey value is a word
data = [
    {"input_ids": torch.tensor(x).long(), "labels": int(y)} for x, y in zip(digits.data, digits.target, strict=True)
]
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(vocab_size=17, max_position_embeddings=64, num_labels=10, **sizes))

with tempfile.TemporaryDirectory() as folder:
    arguments = {"output_dir": folder, "per_device_train_batch_size": 32, "learning_rate": 1e-3, "use_cpu": True}
    arguments |= {"report_to": "none", "save_steps": 20, "logging_strategy": "no", "disable_tqdm": True}
    Trainer(
        model, TrainingArguments(max_steps=20, **arguments), train_dataset=data[:1400], callbacks=[Sparse()]
    ).train()
    again = Trainer(
        model, TrainingArguments(max_steps=60, **arguments), train_dataset=data[:1400], callbacks=[Sparse()]
    )
    again.train(resume_from_checkpoint=True)

with torch.no_grad():
    answers = model.eval()(input_ids=torch.stack([row["input_ids"] for row in data[1400:]])).logits.argmax(1)
right = (answers == torch.tensor([row["labels"] for row in data[1400:]])).float().mean().item()
print(f"{len(twofour.masks.of(model))} weights 2:4, {100 * right:.1f} % right")
