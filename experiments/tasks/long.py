"""The same tasks with repetitions as long as published recipes, which a GPU makes in minutes."""

from __future__ import annotations

import torch

from tasks.base import Batches
from tasks.cifar10 import Cifar10
from tasks.sst2 import Sst2
from tasks.stsb import Stsb
from tasks.wikitext import WikiText


class LongCifar10(Cifar10):
    """Thirty epochs a repetition."""

    name = "cifar10-long"
    title = "CIFAR-10, ResNet-20 (published checkpoint), 30 epochs a repetition"
    notes = (
        "The checkpoint was trained for 200 epochs; each repetition, control included, has {epochs} (SGD 0.05, "
        "momentum 0.9, weight decay 1e-4, batch 128, one cycle; crops with a black border, as it saw them). "
        "The stem and the classifier stay dense (ASP's rule)."
    )
    epochs = 30
    rewound = False


class LongStsb(Stsb):
    """Four epochs, as sentence-transformers' example of this data set has."""

    name = "stsb-long"
    title = "STS Benchmark, MiniLM-L6 (published weights), 4 epochs a repetition"
    notes = (
        "Spearman's rank correlation times 100 on the test split, cosine of mean-pooled embeddings. A repetition "
        "is {epochs} epochs on the 5,749 training pairs (AdamW 5e-5, batch 32, squared error of the cosine against "
        "score / 5, one cycle); the control is the dense model fine-tuned the same. 512 training sentences "
        "calibrate the criteria."
    )
    epochs = 4
    draws = patterns = ()


class LongSst2(Sst2):
    """Three epochs on the whole training split, as Devlin et al. 2019 (arXiv 1810.04805, appendix A.3) fine-tune."""

    name = "sst2-long"
    title = "SST-2, MiniLM-L6, 3 epochs on the whole split, pruned, 3 epochs again"
    notes = (
        "Each fine-tuning, the dense one, the control and the sparse one, has {epochs} epochs on 6,920 sentences "
        "(AdamW 5e-5, batch 32, one cycle). Test split. The head stays dense (ASP's rule)."
    )
    epochs = 3

    def loader(self, seed: int) -> Batches:
        """Batches of 32 sentences of like length, of all."""
        lengths = torch.tensor([len(text) for text in self.train[0]])
        return Batches(len(lengths), 32, self._batch, lengths)


class LongWikiText(WikiText):
    """The whole training split."""

    name = "wikitext-long"
    title = "WikiText-2, the whole split, a GPT of 4 layers, width 128 (0.8 M parameters beside the embedding)"
    notes = (
        "All 2.1 million training tokens, the 8,191 most frequent words and `<unk>`, context 64; each training has "
        "{epochs} epochs (AdamW 2e-3, weight decay 0.1, batch 32, one cycle). Perplexity on the test split; lower is "
        "better. It compares models of this table with each other, not with published ones: the vocabulary is cut."
    )
    epochs = 4
    tokens = None
