"""The experiment on block-sparse recurrent nets at toy size: its arms are what they say, and so is its page."""

import statistics
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from twofour import masks

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture(scope="module", autouse=True)
def on_path():
    sys.path.insert(0, str(EXPERIMENTS))
    yield
    sys.path.remove(str(EXPERIMENTS))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch):
    """A GRU of 16 that learns a text of six words in four epochs of ten steps."""
    from tasks import characters

    for name, value in {"EPOCH": 10 * 8 * 4, "CONTEXT": 8, "BATCH": 4, "EMBEDDING": 8, "STREAMS": 2}.items():
        monkeypatch.setattr(characters, name, value)

    class Toy(characters.Characters):
        name, title, notes, cell = "blocks-toy", "Toy text", "Nothing but {epochs} epochs.", nn.GRU
        width, larger, epochs = 16, 24, 4

        def text(self):
            words = ("block ", "zero ", "gate ", "tile ", "lasso ", "step ")
            order = torch.randint(len(words), (400,), generator=torch.Generator().manual_seed(0))
            whole = "".join(words[place] for place in order)
            return whole[:1500], whole[1500:]

    return Toy()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import records

    monkeypatch.setattr(records, "TRACKED", tmp_path / "records")
    monkeypatch.setattr(records, "SCRATCH", tmp_path / "runs")
    return tmp_path


@pytest.mark.long
def test_every_arm_is_what_its_row_says(toy) -> None:
    import block_rnn
    from block_rnn import ARMS, DENSE, SMALL, measured, sparsity

    assert len({arm.key for arm in ARMS}) == len(ARMS)
    rows = []
    for arm in [arm for arm in ARMS if max(arm.blocks) < 8]:  # of sixteen columns larger blocks leave no choice
        rows.append(measured(toy, arm, 0, rows))
    row = {row.key: row for row in rows}
    assert list(row[DENSE.key].quantiles) == ["recurrent.weight_ih_l0", "recurrent.weight_hh_l0"]
    kept = row["4x4 cubic"].parameters
    assert row[DENSE.key].sparsity == row[SMALL.key].sparsity == 0
    assert row[DENSE.key].parameters - kept == round(row["4x4 cubic"].sparsity * 48 * (8 + 16))
    step = toy.parameters(row[SMALL.key].width + 1) - row[SMALL.key].parameters
    assert abs(row[SMALL.key].parameters - (row[DENSE.key].parameters - 0.8 * 48 * 24)) <= step / 2
    assert row["large 4x4 cubic"].width == 24
    assert abs(row["large 4x4 cubic"].parameters - row[DENSE.key].parameters) <= 2 * 16  # whole blocks, two weights
    for arm in ARMS:
        if arm.key in row and arm.way == "cubic":
            assert row[arm.key].sparsity == pytest.approx(sparsity(toy, arm), abs=0.01)
        if arm.key in row and arm.way in ("BP", "GLP"):
            assert 0 < row[arm.key].sparsity < 1 and row[arm.key].factor > 0
    assert block_rnn.zeros(toy.network(0)) == 0


def test_a_factor_is_searched_once_and_a_seed_gives_the_same_figure(toy, monkeypatch) -> None:
    import block_rnn
    from block_rnn import DENSE, Arm, measured

    arm, searched = Arm("GLP", (4, 4)), []
    find = block_rnn.found

    def watched(*given):
        searched.append(given)
        return find(*given)

    monkeypatch.setattr(block_rnn, "found", watched)
    rows = [measured(toy, DENSE, seed, []) for seed in (0, 1)]
    first = measured(toy, arm, 0, rows)
    other = measured(toy, arm, 1, [*rows, first])
    alone = measured(toy, arm, 0, [*rows, other])  # without the trials before
    assert len(searched) == 1 and first.factor == other.factor
    assert (alone.value, alone.sparsity) == (first.value, first.sparsity)


def test_masks_hold_to_the_end_and_no_block_crosses_a_gate(toy, monkeypatch) -> None:
    import block_rnn
    from block_rnn import DENSE, Arm, measured

    held = []
    row = block_rnn.row

    def watched(done, arm, factor):
        held.append(done.model)
        return row(done, arm, factor)

    monkeypatch.setattr(block_rnn, "row", watched)
    rows = [measured(toy, DENSE, 0, [])]
    measured(toy, Arm("BP", (4, 4)), 0, rows)
    pruned = masks.of(held[-1])
    assert {name: mask.pattern.name[:9] for name, mask in pruned.items()} == {
        "recurrent.weight_ih_l0": "block:4x4",
        "recurrent.weight_hh_l0": "block:4x4",
    }
    for mask in pruned.values():
        blocks = mask.keep.unflatten(0, (-1, 4)).unflatten(-1, (-1, 4)).movedim(1, 2).flatten(2)
        assert bool((blocks.all(-1) | ~blocks.any(-1)).all())
        assert int(mask.parameter.detach()[~mask.keep].count_nonzero()) == 0


def test_a_stopped_run_goes_on(toy, here, monkeypatch) -> None:
    import block_rnn
    import run
    from records import Trained, load

    monkeypatch.setattr(run, "BLOCKS", {"blocks-toy": lambda: toy})
    monkeypatch.setattr(block_rnn, "ARMS", (block_rnn.DENSE, block_rnn.SMALL, block_rnn.Arm("cubic", (4, 4))))
    run.blocks("toy", seeds="0", only="small *", record=True)
    run.blocks("toy", seeds="0,1", only="*", record=True)
    rows = load(here / "records" / "blocks-toy.json", Trained)[1]
    assert [(row.key, row.seed) for row in rows] == [
        (key, seed) for seed in (0, 1) for key in ("dense", "small dense", "4x4 cubic")
    ]
    monkeypatch.setattr(block_rnn, "measured", None)
    run.blocks("toy", seeds="0,1", only="*", record=True)  # nothing is left to train


def test_the_page_says_what_is_in_order_and_what_beats_the_small_net(toy, here, monkeypatch) -> None:
    import blocks_page
    from records import Records, Trained

    records = Records("blocks-toy", {**vars(toy.metric), "decimals": 3}, True, Trained)
    means = {"dense": 2.0, "small dense": 2.3, "1x2 BP": 2.1, "4x4 GLP": 2.2, "4x4 BP": 2.4, "8x8 BP": 2.4}
    noise = {"8x8 BP": (0.05, -0.05, 0.0)}
    for seed in range(3):
        for key, mean in means.items():
            zeros = 0.0 if "dense" in key else 0.8
            value = mean + noise.get(key, (0.001, 0.0, -0.001))[seed] + 0.1 * seed
            records.add(Trained(key, seed, value, zeros, 1000, 16, 0.5 if zeros else 0.0, {}, 1.0, 4, "abc"))
    records.add(Trained("large 4x4 GLP", 0, 1.9, 0.7, 5000, 24, 0.4, {}, 1.0, 4, "abc"))
    monkeypatch.setattr(blocks_page, "BLOCKS", {"blocks-toy": lambda: toy, "blocks-waiting": lambda: toy})
    _, text, waiting = blocks_page.sections(here / "records")
    spread = statistics.stdev((2.101, 2.2, 2.299))
    assert f"| 1x2 BP | 16 | 80.0 | 1,000 | 2.200 ± {spread:.3f} | +0.100 ± 0.000 | -0.200 ± 0.000 | 0.50 | 3 |" in text
    assert "1x2 BP, 4x4 GLP in order (+0.100 ± 0.000); 4x4 GLP, 4x4 BP in order (+0.200 ± 0.000)" in text
    assert "4x4 BP, 8x8 BP tie (+0.000 ± 0.123)" in text  # 4.303 * 0.0495 / sqrt(3)
    assert "Against small dense, of as many parameters (lower is better): better: 4x4 GLP -0.100, 1x2 BP -0.200" in text
    assert "worse: 4x4 BP +0.100" in text
    assert "tie: large 4x4 GLP -0.101 (one seed)" in text
    assert "Not run: 16x16 BP, 16x16 GLP, " not in text and "Not run: 8x8 GLP, 16x16 BP" in text
    assert waiting.startswith(
        "## Blocks: Toy text\n\nNot measured yet: `python experiments/run.py blocks toy --record`."
    )


def test_real_characters_are_numbered_by_the_training_text() -> None:
    from tasks.characters import HELD_OUT, TRAIN, ShakespeareGru
    from twofour.errors import DataError

    task = ShakespeareGru()
    try:
        train, held, alphabet = task.parts
    except DataError as error:
        pytest.skip(str(error))
    assert len(train) == TRAIN and len(held) == HELD_OUT and int(held.max()) < alphabet
    inputs, targets = next(iter(task.loader(0)))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
