"""The results page: its arithmetic, its records, and that an experiment's rows are what they say."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import twofour
from tests.experiments.toys import toy
from twofour import masks


@pytest.mark.long
def test_a_row_says_what_was_done(here):
    from arms import CONTROL, Arm
    from run import measured

    task = toy()
    control, again = (measured(task, arm, 0) for arm in (CONTROL, Arm("2:4", "wanda", again=True)))
    once = measured(task, Arm("2:4", "wanda"), 0)
    assert control.dense == control.one_shot == again.dense == once.dense  # one dense model per seed, trained once
    assert once.one_shot == once.value == again.one_shot and once.epochs == 0 and again.epochs == 2
    assert control.key == "again: dense, trained again (the control)" and again.key == "again: 2:4 wanda"
    assert measured(task, Arm("2:4", "wanda", again=True), 0).value == again.value  # the same seed, the same figure


def test_a_row_that_is_pruned_last_is_the_trained_control_pruned(here, monkeypatch):
    import run
    from arms import AGAIN, CONTROL

    arm = next(arm for arm in AGAIN if arm.last)
    assert arm.key == "again: 2:4 auto, pruned last"
    task, trained = toy(), []
    train = run.training.train
    monkeypatch.setattr(run.training, "train", lambda *a, **given: trained.append(given["name"]) or train(*a, **given))
    row = run.measured(task, arm, 0)
    assert trained == ["dense", "control"], "nothing is trained behind the pruning"
    model = run._kept_control(task, 0)
    assert run._evaluated(task, model) == run.measured(task, CONTROL, 0).value, "it was trained as the control"
    arm.apply(model, task, 0, arm.drawn_for(task, 0))
    assert row.value == row.one_shot == run._evaluated(task, model) and row.epochs == 2


def test_a_row_with_its_own_control_is_what_finetune_does_by_itself(here, monkeypatch):
    import run
    from arms import AGAIN
    from over_seeds import difference

    arm = next(arm for arm in AGAIN if arm.own)
    assert arm.key == "again: 2:4 default, its own control"
    results, whole = [], twofour.finetune

    def finetune(*given, **options):
        assert not {"control", "teacher", "keep"} & options.keys(), "the default is measured"
        results.append(whole(*given, **options))
        return results[-1]

    monkeypatch.setattr(twofour, "finetune", finetune)
    task = toy()
    row = run.measured(task, arm, 0)
    (result,) = results
    assert result.control is not None and result.teacher == "the control"
    assert row.control == result.control.evaluation and row.instead == (result.sparse.instead is not None)
    assert row.value == result.sparse.evaluation
    another = run.measured(task, next(arm for arm in AGAIN if arm.key.endswith("(the control)")), 0)
    apart = f"{row.value - row.control:+.2f} (one seed)"
    assert difference([row], []) == difference([row], [another]) == apart, "it is compared with its own control"


def test_a_row_without_an_optimiser_is_handed_a_copy_as_its_control(here, monkeypatch):
    import run
    from arms import AGAIN

    arm = next(arm for arm in AGAIN if arm.own and arm.criterion == "bare")
    results, whole = [], twofour.finetune

    def finetune(model, *given, **options):
        assert not {"optimizer", "schedule", "teacher"} & options.keys() and options["control"] is not model
        results.append(whole(model, *given, **options))
        return results[-1]

    monkeypatch.setattr(twofour, "finetune", finetune)
    row = run.measured(toy(), arm, 0)
    assert row.key == "again: 2:4 bare, its own control" and results[0].teacher == "the control"
    assert row.control == results[0].control.evaluation and row.value == results[0].sparse.evaluation


def test_a_row_that_was_stopped_goes_on_where_it_was(here, monkeypatch):
    import run
    from arms import AGAIN

    arm = next(arm for arm in AGAIN if arm.own)
    want, answers = run.measured(toy(), arm, 0), []
    task = toy()
    evaluate = task.evaluate

    def stopped(model):
        answers.append(evaluate(model))
        if len(answers) == 5:  # after the first epoch of the sparse run
            raise KeyboardInterrupt
        return answers[-1]

    monkeypatch.setattr(task, "evaluate", stopped)
    with pytest.raises(KeyboardInterrupt):
        run.measured(task, arm, 0)
    (folder,) = run.SCRATCH.glob("running-*")
    assert (folder / "control.pt").exists()
    row = run.measured(toy(), arm, 0)
    assert (row.value, row.control) == (want.value, want.control) and not folder.exists()


@pytest.mark.parametrize("criterion", ["default", "held back", "bare"])
def test_a_row_of_the_default_recipe_is_given_the_dense_model(here, criterion, monkeypatch):
    from arms import AGAIN, Arm
    from run import measured

    arm = next(arm for arm in AGAIN if arm.criterion == criterion)
    assert arm.whole and not Arm("2:4", "wanda").whole and arm.key == f"again: 2:4 {criterion}"
    task, given = toy(), []
    whole = twofour.finetune
    monkeypatch.setattr(twofour, "finetune", lambda *a, **options: given.append(options) or whole(*a, **options))
    row = measured(task, arm, 0)
    assert [(options["control"], options["teacher"]) for options in given] == [(None, None)], "an untaught row"
    assert (row.key, row.epochs) == (arm.key, 2) and 50 < row.one_shot <= 100 and row.value > row.dense - 10


def test_examples_that_are_held_back_are_not_trained_on():
    loader = toy().loader(0)
    used, held = loader.hold_back(1)
    rows = [torch.cat([x for x, _ in part]) for part in (used, held)]
    assert [len(part) for part in rows] == [224, 12]  # 244 are left: seven whole batches of 32
    assert not (rows[0][:, None] == rows[1][None]).all(-1).any()
    assert all(torch.equal(a[0], b[0]) for a, b in zip(held, loader.hold_back(1)[1], strict=True))


def test_every_arm_prunes_as_it_is_called():
    from arms import AGAIN, ONE_SHOT, built

    assert len({arm.key for arm in (*ONE_SHOT, *AGAIN)}) == len((*ONE_SHOT, *AGAIN))
    for arm in ONE_SHOT:
        assert built(arm.criterion), arm.criterion
        if arm.permuted:
            continue
        task = toy()
        model = task.network(0)
        arm.apply(model, task, 3, arm.drawn_for(task, 3))
        assert {mask.pattern.name for mask in masks.of(model).values()} == {arm.pattern}
        assert twofour.check(model).ok


def test_records_go_on_and_are_whole(here):
    from records import Records, Row, load

    row = Row("one-shot: 2:4 magnitude", 0, 90.0, 80.0, 80.0, 1.0, 0, "abc")
    first = Records("toy", {"name": "accuracy"}, tracked=True)
    first.add(row)
    again = Records("toy", {"name": "accuracy"}, tracked=True)
    assert again.rows == {(row.key, 0): row}
    again.add(Row("one-shot: 2:4 magnitude", 1, 91.0, 82.0, 82.0, 1.0, 0, "abc"))
    assert len(load(again.path)[1]) == 2
    again.path.write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        load(again.path)


def test_the_page_pairs_seeds_and_says_when_nothing_differs(here, monkeypatch):
    import page
    from arms import CONTROL, Arm
    from records import Records, Row

    records = Records("toy", {"name": "accuracy", "unit": "%", "higher": True, "held_out": 400, "of": "points"}, True)
    sparse, chance = Arm("2:4", "magnitude", again=True), Arm("2:4", "random", again=True)
    for seed, (control, ours, theirs) in enumerate([(90.0, 90.5, 90.4), (80.0, 80.7, 80.9), (70.0, 70.6, 70.5)]):
        for arm, value in ((CONTROL, control), (sparse, ours), (chance, theirs)):
            records.add(Row(arm.key, seed, control, 50.0, value, 1.0, 2, "abc"))
    for arm, value in ((Arm("2:4", "magnitude"), 60.0), (Arm("2:4", "wanda"), 59.0), (Arm("2:4", "ria"), 61.0)):
        records.add(Row(arm.key, 0, 90.0, value, value, 1.0, 0, "abc"))
    records.add(Row(Arm("2:4", "wanda", permuted=True).key, 0, 90.0, 58.0, 58.0, 1.0, 0, "abc"))
    monkeypatch.setattr(
        page, "TASKS", {"toy": toy, "waiting": lambda: type("Waiting", (type(toy()),), {"name": "waiting"})()}
    )
    text = page.write().read_text()
    # differences 0.5, 0.7, 0.6: mean 0.6, deviation 0.1, half the interval 4.303 * 0.1 / sqrt(3) = 0.25
    assert "| 2:4 magnitude | 50.00 ± 2.50 | 80.60 ± 9.95 | +0.60 ± 0.25 | 3 |" in text
    assert "| 2:4 magnitude | 60.00 ± 2.45 | -30.00 |" in text  # sqrt(60 * 40 / 400) = 2.45
    assert "magnitude and a random mask tie: +0.00 ±" in text
    assert "Worse than magnitude here: 2:4 wanda. No better for the permutation here: 2:4 wanda, permuted." in text
    assert "Not measured yet: `python experiments/run.py task waiting --record`." in text
    assert "Nothing but 2 epochs." in text


def test_the_page_says_which_goal_is_missed():
    import page
    from arms import CONTROL, Arm
    from records import Row

    default, random = Arm("2:4", "default", again=True), Arm("2:4", "random", again=True)

    def said(of, name, higher, spread=(0.0,)):
        found = {
            arm.key: [Row(arm.key, n, 60.0, 60.0, value + n * by, 1.0, 1, "abc") for n, by in enumerate(spread)]
            for arm, value in of.items()
        }
        found[CONTROL.key] = [dataclasses.replace(row, value=of[CONTROL]) for row in found[CONTROL.key]]
        return page._goal(list(of), found, {"name": name, "higher": higher})

    worse, near = {CONTROL: 58.0, default: 60.0, random: 99.0}, {CONTROL: 58.0, default: 58.5}
    assert said(worse, "perplexity", False) == ["Goal of +0.5: missed by 2:4 default (+2.00).\n"]
    assert said(near, "perplexity", False) == ["Goal of +0.5: met by 2:4 default.\n"]
    alone = "Goal of -0.2: by the mean alone, whose interval is no smaller than 0.4, by 2:4 default"
    assert said(worse, "accuracy", True) == [f"{alone} (one seed).\n"]
    low, even = {CONTROL: 58.0, default: 57.7}, {CONTROL: 58.0, default: 57.8}
    assert said(low, "accuracy", True) == ["Goal of -0.2: missed by 2:4 default (-0.30).\n"]
    assert said(even, "accuracy", True, (0.0, 0.0, 0.0)) == ["Goal of -0.2: met by 2:4 default.\n"]
    # differences -0.3, -0.1, 0.1: deviation 0.2, half the interval 4.303 * 0.2 / sqrt(3)
    assert said(low, "accuracy", True, (0.0, 0.2, 0.2)) == [f"{alone} (± 0.50).\n"]
    assert said(near, "bits per character", False) == []


def test_the_page_marks_rows_whose_control_began_with_another_dense_model():
    import page
    from arms import CONTROL, Arm
    from records import Row

    arm, metric = Arm("2:4", "magnitude", again=True), {"unit": "%", "held_out": 400}
    control = [Row(CONTROL.key, n, 60.0 + n, 60.0, 62.0, 1.0, 1, "abc") for n in range(2)]
    row = Row(arm.key, 1, 61.0, 60.0, 61.5, 1.0, 1, "abc")
    assert page._again_line(arm, [row], control, metric).endswith("| -0.50 (one seed) | 1 |")
    other = dataclasses.replace(row, dense=61.01)
    assert page._again_line(arm, [other], control, metric).endswith("| -0.50 (one seed) * | 1 |")
    own = dataclasses.replace(other, control=61.0)
    assert page._again_line(arm, [own], control, metric).endswith("| +0.50 (one seed) | 1 |")


def test_the_page_says_which_of_two_stands():
    import page
    from arms import AGAIN
    from records import Row

    arm = next(arm for arm in AGAIN if arm.own)
    rows = [Row(arm.key, n, 60.0, 60.0, 60.0, 1.0, 1, "abc", control=60.0, instead=n > 0) for n in range(3)]
    said = "2:4 default, its own control: the control, pruned last, stands in 2 of 3 seeds.\n"
    assert page._stood([arm], {arm.key: rows}) == [said]


def test_spearman_is_scipys():
    from scipy.stats import spearmanr

    from tasks.stsb import spearman

    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(6, (2, 40), generator=generator).double()
    assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)


def test_the_committed_page_is_what_the_records_say(tmp_path, monkeypatch):
    import page
    import records

    committed = page.PAGE
    if not any(records.TRACKED.glob("*.json")):
        pytest.skip("no records yet")
    monkeypatch.setattr(page, "PAGE", tmp_path / "results.md")
    assert page.write().read_text() == committed.read_text(), "run `python experiments/run.py page`"


def test_nearness_compares_with_the_exact_gradients(here, monkeypatch):
    import gradients
    import gradients_page
    from gradients import Rule
    from records import Nearness, Records

    task = toy()
    whole, half = Rule("4:4", "magnitude"), Rule("2:4", "magnitude")
    monkeypatch.setattr(gradients, "RULES", (gradients.CONTROL, whole, half))
    monkeypatch.setattr(gradients_page, "RULES", (gradients.CONTROL, whole, half))
    deep = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    monkeypatch.setattr(task, "network", lambda seed: deep)
    rows = gradients.nearness(task, 1)
    assert [row.key for row in rows] == ["4:4 magnitude", "2:4 magnitude"]
    assert rows[0].size == pytest.approx(1) and rows[0].lowest == pytest.approx(1)
    assert rows[1].size < 1 and rows[1].lowest == rows[1].cosine < 0.999
    records = Records("gradients-nearness", {}, True, Nearness)
    for row in rows:
        records.add(row)
    monkeypatch.setattr(gradients_page, "GRADIENTS", {})
    (text,) = gradients_page.sections(here / "records")
    assert f"| 2:4 magnitude | {rows[1].size:.3f} | {rows[1].cosine:.3f} | {rows[1].lowest:.3f} | 1 |" in text


def test_gradients_have_a_control_of_the_same_seed(here, monkeypatch):
    import gradients
    import gradients_page
    from gradients import RULES, Rule
    from records import Records, load
    from twofour.training import sdgp

    attach, layers = sdgp.attach, []

    def watched(*given, **named):
        handle = attach(*given, **named)
        layers.append(handle.layers)
        return handle

    monkeypatch.setattr(sdgp, "attach", watched)
    task = toy()
    rules = {rule.key: gradients.measured(task, rule, 1) for rule in (RULES[0], Rule("2:4", "rescaled"))}
    assert layers == [("0",)]  # two outputs make no group of four: the head stays exact
    assert rules["dense"].value == gradients.measured(task, RULES[0], 1).value  # the same seed, the same figure
    records = Records(
        "gradients-toy",
        {"name": "accuracy", "unit": "%", "higher": True, "held_out": 256, "of": "points"},
        True,
        gradients.Run,
    )
    for run in rules.values():
        records.add(run)
    assert load(records.path, gradients.Run)[1] == list(rules.values())
    monkeypatch.setattr(gradients_page, "GRADIENTS", {"gradients-toy": toy})
    (text,) = gradients_page.sections(here / "records")
    apart = rules["2:4 rescaled"].value - rules["dense"].value
    assert f"| {apart + 0.0:+.2f} (one seed) | 1 | 95.2 |" in text


def test_a_narrow_resnet9_is_the_authors_network():
    from tasks.resnet9 import ResNet9

    model = ResNet9(16)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [16, 32, 32, 32, 64, 64, 64, 32]
    assert twofour.training.sdgp.attach(model, "2:4").skipped == {"stem.0": "3 inputs"}


def test_two_processes_that_add_rows_keep_those_of_both(here):
    from records import Records, Row, load

    def row(key: str) -> Row:
        return Row(key, 0, 1.0, 1.0, 1.0, 0.1, 0, "none")

    one, other = Records("toy", {}, True), Records("toy", {}, True)
    one.add(row("a"))
    other.add(row("b"))
    one.add(row("c"))
    assert [found.key for found in load(one.path)[1]] == ["a", "b", "c"]
