"""The experiment on shrunk nets at toy size: every arm is made, within the size that was learned; and its page."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


def test_every_arm_has_the_size_that_was_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import records
    import shrink_nets
    import shrink_page
    from tasks import base, wide

    class Toy(wide.ShrinkFashion):
        epochs = 1
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
    monkeypatch.setattr(shrink_nets, "STRENGTHS", {"learned": 1.3, "learned, stronger": 8.0})
    kept = records.Records(Toy.name, asdict(Toy().metric), True, records.Shrunk)
    for row in shrink_nets.measured(Toy(), 0):
        kept.add(row)
    rows = {row.key: row for row in kept.rows.values()}
    assert set(rows) == set(shrink_nets.ARMS)
    size = {key: row.parameters for key, row in rows.items()}
    assert size["learned, stronger"] < size["learned"] == size["small"] < size["dense"]
    assert all(0.4 * size["learned"] < size[key] <= size["learned"] for key in ("slimming", "L1", "random"))
    assert rows["learned, stronger"].layers and all(after < 32 for _, after in rows["learned"].widths.values())
    monkeypatch.setattr(shrink_page, "SHRINK", {Toy.name: Toy})
    text = "\n".join(shrink_page.sections(tmp_path, tmp_path))
    assert all(f"| {key} | {size[key]:,}" in text for key in rows)
    assert (tmp_path / f"{Toy.name}.svg").read_text().count("<svg") == 1
    assert "Not measured yet" in shrink_page.sections(tmp_path / "none", tmp_path)[1]
