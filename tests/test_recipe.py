"""Rules, their order, their file, and what is refused."""

from pathlib import Path

import pytest
from torch import nn

from tests.turns import in_turn
from twofour import criteria
from twofour.errors import LayerError, PatternError, RecipeError
from twofour.patterns import NM
from twofour.recipe import Recipe


def network() -> nn.Module:
    block = {"fc1": nn.Linear(16, 32), "fc2": nn.Linear(32, 16)}
    return nn.ModuleDict(
        {
            "encoder": nn.ModuleList([nn.ModuleDict(block), nn.ModuleDict({"fc1": nn.Linear(16, 8)})]),
            "norm": nn.LayerNorm(16),
            "head": nn.Linear(16, 10),
        }
    )


def assigned(recipe: Recipe, model: nn.Module) -> dict[str, str]:
    return {weight.layer: pattern.name for weight, pattern in recipe.assign(model).weights}


def test_a_pattern_alone_means_everything_eligible() -> None:
    recipe = Recipe.parse("2:4")
    assert recipe == Recipe((("*", NM(2, 4)),)) == Recipe.parse(NM(2, 4))
    assert assigned(recipe, network()) == dict.fromkeys(["encoder.0.fc1", "encoder.0.fc2", "encoder.1.fc1"], "2:4")
    assert recipe.pattern_for("anything") == NM(2, 4)


def test_the_first_rule_that_matches_decides() -> None:
    recipe = Recipe.parse({"encoder.*.fc1": "1:4", "encoder.0": NM(2, 4), "*": "dense"})
    assert assigned(recipe, network()) == {"encoder.0.fc1": "1:4", "encoder.0.fc2": "2:4", "encoder.1.fc1": "1:4"}
    skipped = {skipped.name: skipped.reason for skipped in recipe.assign(network()).skipped}
    assert skipped == {"head.weight": "out_features 10 is not a multiple of 8 (ASP's rule)"}
    assert recipe.pattern_for("head") is None and recipe.pattern_for("encoder.1.fc1") == NM(1, 4)


def test_layers_without_a_rule_or_under_a_dense_one_say_so() -> None:
    recipe = Recipe.parse({"encoder.0.fc1": "dense", "encoder.0": "2:4"})
    reasons = {skipped.layer: skipped.reason for skipped in recipe.assign(network()).skipped}
    assert reasons["encoder.0.fc1"] == "dense by the rule 'encoder.0.fc1'"
    assert reasons["encoder.1.fc1"] == "no rule of the recipe matches it"


def test_a_tied_layer_can_be_named_by_any_of_its_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    model["b"].weight = model["a"].weight
    assert assigned(Recipe.parse({"b": "2:4"}), model) == {"a": "2:4"}


def test_a_group_that_does_not_divide_the_axis_is_a_reason() -> None:
    recipe = Recipe.parse("2:4", eligibility="any")
    model = nn.Sequential(nn.Linear(770, 8), nn.Linear(8, 3))
    assert assigned(recipe, model) == {"1": "2:4"}
    (skipped,) = recipe.assign(model).skipped
    assert skipped.reason == "weight (8, 770): reduction axis 770 is not a multiple of 4 (2:4)"


@in_turn(
    ("source", "options", "error", "message"),
    [
        ({"encoder.*.fc3": "2:4"}, {}, RecipeError, r"matches no layer\n  got +'encoder.\*.fc3'\n.*\n  try +nearest"),
        ({"fc1": "2:4"}, {}, RecipeError, "matches no layer"),
        ({"head": "2:4", "*": "2:4"}, {}, LayerError, r"prunes nothing\n  reason  `head.weight`: out_features 10"),
        ({"norm": "2:4"}, {}, LayerError, "the rule 'norm' asks for 2:4 and prunes nothing"),
        ({"encoder.*": "2:4", "encoder.0": "1:4"}, {}, LayerError, "an earlier rule decides all its layers"),
        ({"encoder.0.fc1": "2:4"}, {"skip": "encoder.0"}, LayerError, "left out by skip='encoder.0'"),
        ({"encoder.0.fc1": "9:32", "*": "2:4"}, {}, LayerError, r"axis 16 is not a multiple of 32 \(9:32\)"),
    ],
    ids=["nearest", "not-a-leaf", "ineligible", "norm", "shadowed", "skipped", "group"],
)
def test_a_rule_without_effect_is_refused(source, options, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Recipe.parse(source, **options).assign(network())


@in_turn(
    ("source", "options", "error", "message"),
    [
        ({"a": "5:4"}, {}, PatternError, "rule 'a': the pattern '5:4' is impossible"),
        ({"a": "channel"}, {}, PatternError, "whole channels change the shapes of weights"),
        ({"a": 4}, {}, PatternError, "must be text or a Pattern"),
        ({3: "2:4"}, {}, RecipeError, "glob must be text"),
        ({}, {}, RecipeError, "the recipe has no rules"),
        ("2:4", {"eligibility": "all"}, RecipeError, r"eligibility rule is unknown\n  got +'all'"),
        ("2:4", {"criterion": "wando"}, RecipeError, 'did you mean "wanda"'),
        (Recipe.parse("2:4", eligibility="any"), {"eligibility": "nope"}, RecipeError, "`eligibility` is given twice"),
    ],
)
def test_malformed_recipes(source, options, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Recipe.parse(source, **options)


def test_a_recipe_keeps_its_own_settings_and_gains_skips() -> None:
    recipe = Recipe.parse("2:4", skip=["a"], eligibility="any")
    assert Recipe.parse(recipe) == recipe
    assert Recipe.parse(recipe, skip=["b", "a"]).skip == ("a", "b")


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe.parse("2:4"),
        Recipe.parse({"encoder.*.fc1": "4:8-pairs", "*": "dense"}, skip=["head", "x.[0-9]"], eligibility="any"),
        Recipe.parse({'quote " back \\ tab \t newline \n del \x7f emoji \N{GRINNING FACE}': "8:16"}),
    ],
)
def test_a_recipe_survives_its_file(recipe: Recipe, tmp_path: Path) -> None:
    recipe.save(tmp_path / "recipe.toml")
    assert Recipe.load(tmp_path / "recipe.toml") == recipe
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_the_file_is_readable_and_its_defaults_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('format = 1\n[[rule]]\nlayers = "*"\npattern = "2:4"\n')
    assert Recipe.load(path) == Recipe.parse("2:4")
    assert Recipe.load(path).to_toml() == (
        'format = 1\ncriterion = "magnitude"\neligibility = "asp"\nskip = []\n\n'
        '[[rule]]\nlayers = "*"\npattern = "2:4"\n'
    )


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.toml"
    Recipe.parse("2:4").save(path)

    def broken(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(RecipeError, match="disk full"):
        Recipe.parse("1:4").save(path)
    assert Recipe.load(path) == Recipe.parse("2:4") and len(list(tmp_path.iterdir())) == 1


RULE = '[[rule]]\nlayers = "*"\npattern = "2:4"\n'


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("format = ", RecipeError, "recipe.toml' cannot be read"),
        (RULE, RecipeError, r"recipe.toml: the recipe has another format\n  got +None"),
        ("format = 2\n" + RULE, RecipeError, "wanted  format = 1"),
        ("format = 1\n", RecipeError, "recipe.toml: the recipe has no rules"),
        ('format = 1\npatern = "x"\n' + RULE, RecipeError, "unknown key"),
        ('format = 1\nelegibility = "x"\n' + RULE, RecipeError, "did you mean `eligibility`"),
        ('format = 1\nskip = "head"\n' + RULE, RecipeError, "`skip` is malformed"),
        ("format = 1\nrule = 3\n", RecipeError, "rules are malformed"),
        ('format = 1\n[[rule]]\nlayers = "*"\n', RecipeError, "a rule lacks `pattern`"),
        ('format = 1\n[[rule]]\nlayer = "*"\n', RecipeError, "did you mean `layers`"),
        (
            'format = 1\n[[rule]]\nlayers = "*"\npattern = "2"\n',
            PatternError,
            r"recipe.toml: rule '\*': the text is not",
        ),
        ('format = 1\ncriterion = "ria:a=1"\n' + RULE, RecipeError, "no such option"),
    ],
)
def test_files_that_are_not_recipes(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(error, match=message):
        Recipe.load(tmp_path / "recipe.toml")


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.load(tmp_path / "binary.toml")


def test_the_criterion_is_an_object_inside() -> None:
    assert Recipe.parse("2:4", criterion="magnitude").criterion == criteria.Magnitude()


def test_where_a_recipe_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "recipe.toml"):
        with pytest.raises(RecipeError, match=r"cannot be written\n  got (.|\n)*\n  wanted (.|\n)*\n  try "):
            Recipe.parse("2:4").save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
