"""The experiments on shrunk nets at toy size: every arm is made, within the size that is asked for; and their page."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


def test_a_cycle_of_learning_rates_goes_on_behind_the_cut() -> None:
    from tasks import base

    def rates(steps: int, begin: int = 0) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3)
        schedule = base.one_cycle(optimizer, 20, begin)
        found = []
        for _ in range(steps):
            found += schedule.get_last_lr()
            optimizer.step()
            schedule.step()
        return found

    assert rates(15) + rates(5, 15) == rates(20)
    assert max(rates(20)) == pytest.approx(0.3) and rates(20)[-1] < 0.01


def test_every_arm_has_the_size_that_was_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import records
    import shrink_nets
    import shrink_page
    from tasks import base, wide

    class Toy(wide.ShrinkFashion):
        epochs, strengths, restarts, taught, after = 1, (0.8, 3.0), False, True, 1
        train = torch.randn(80, 1, 12, 12, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 10
        test = train

        def network(self, seed):
            torch.manual_seed(seed)
            stem = (torch.nn.Conv2d(1, 8, 3, 2, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
            head = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10))
            blocks = wide.Block(8, 32), wide.Block(8, 32)
            for block in blocks:
                torch.nn.init.constant_(block.bn1.weight[:16].detach(), 0.2)  # ten steps close these, and no block
            return torch.nn.Sequential(*stem, *blocks, *head)

        def loader(self, seed):
            return base.Batches(80, 8, self._batch)

    monkeypatch.setattr(records, "TRACKED", tmp_path)
    kept = records.Records(Toy.name, asdict(Toy().metric), True, records.Shrunk)
    for row in shrink_nets.measured(Toy(), 0):
        kept.add(row)
    rows = {row.key: row for row in kept.rows.values()}
    assert set(rows) == set(shrink_nets.arms(Toy()))
    size = {key: row.parameters for key, row in rows.items()}
    assert size["learned, stronger"] < size["learned"] == size["small"] < size["dense"]
    assert all(
        0.4 * size["learned"] < size[key] <= size["learned"] for key in ("thresholds", "slimming", "L1", "random")
    )
    assert rows["learned, stronger"].layers and all(after < 32 for _, after in rows["learned"].widths.values())
    monkeypatch.setattr(shrink_page, "SHRINK", {Toy.name: Toy})
    text = "\n".join(shrink_page.sections(tmp_path, tmp_path))
    assert all(f"| {key} | {size[key]:,}" in text for key in rows)
    assert (tmp_path / f"{Toy.name}.svg").read_text().count("<svg") == 1
    assert "Not measured yet" in shrink_page.sections(tmp_path / "none", tmp_path)[1]


def test_an_encoder_is_halved_and_taught_and_a_stopped_seed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    import records
    import shrink_encoder
    import shrink_page
    from tasks import base, minilm, stsb

    ids = torch.randint(0, 90, (64, 6), generator=torch.Generator().manual_seed(0))
    given = ids, torch.ones_like(ids)

    class Toy(stsb.ShrinkStsb):
        train = test = [("a", "b")] * 32, torch.linspace(0, 1, 32)

        def network(self, seed):
            torch.manual_seed(0)
            sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 2}
            return minilm.Embedder(transformers.BertModel(transformers.BertConfig(vocab_size=90, **sizes)).eval())

        def loader(self, seed):
            return base.Batches(32, 8, lambda rows: ((ids[rows], given[1][rows]), self.train[1][rows][:4]))

        def evaluate(self, model):
            first, second = model(*given).chunk(2)
            return 100 * stsb.spearman((first * second).sum(-1), self.test[1])

        def calibration(self):
            return [given]

        def example(self):
            return tuple(part[:2] for part in given)

    monkeypatch.setattr(records, "TRACKED", tmp_path)
    monkeypatch.setattr(shrink_encoder, "SCRATCH", tmp_path)
    kept = records.Records(Toy.name, asdict(Toy().metric), True, records.Shrunk)
    steps: list[int] = []
    loss = Toy.loss
    monkeypatch.setattr(Toy, "loss", lambda self, out, y: steps.append(1) or loss(self, out, y))
    kept.add(next(iter(shrink_encoder.measured(Toy(), 0))))
    assert len(steps) == 4
    for row in shrink_encoder.measured(Toy(), 0, {"dense"}):
        kept.add(row)
    assert len(steps) == 12, "the large model was trained once"
    rows = {row.key: row for row in kept.rows.values()}
    assert set(rows) == set(shrink_encoder.ARMS)
    size = {key: row.parameters for key, row in rows.items()}
    assert (
        0.4 * size["dense"] < size["cut"] == size["distilled"] == size["distilled, layers too"] <= 0.5 * size["dense"]
    )
    assert [rows[key].epochs for key in shrink_encoder.ARMS] == [1, 0, 1, 1]
    assert len({after for _, after in rows["cut"].widths.values()}) == 1, "a configuration has one number"
    monkeypatch.setattr(shrink_page, "SHRINK", {Toy.name: Toy})
    text = "\n".join(shrink_page.sections(tmp_path, tmp_path))
    assert all(f"| {key} | {size[key]:,}" in text for key in rows) and text.count("Goal of -1.0, distilled") == 2
