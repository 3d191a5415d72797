"""TwoFourConfig: what is impossible is refused where it is written, and a config.json carries the rest."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from twofour.errors import CompileError, PatternError, RecipeError
from twofour.integrations import TwoFourConfig, TwoFourQuantizer


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"dtype": "int3"}, CompileError, "int3"),
        ({"dtype": torch.int64}, CompileError, "int64"),
        ({"memory": "tiny"}, CompileError, "tiny"),
        ({"embeddings": "int4"}, CompileError, "type of embeddings"),
        ({"graph": "inductor"}, CompileError, "twofour.compile alone"),
        ({"batch": 1}, CompileError, "batch=1"),
        ({"length": True}, CompileError, "length=True"),
        ({"prune": "2to4"}, PatternError, "2to4"),
        ({"prune": "2:4", "criterion": "best"}, RecipeError, "best"),
        ({"data": ["a sentence"]}, RecipeError, 'prune="2:4"'),
        ({"criterion": "admm"}, RecipeError, "nothing to prune by"),
        ({"skip": "pooler"}, RecipeError, "nothing to prune by"),
    ],
)
def test_the_impossible_is_refused(given, kind, said):
    with pytest.raises(kind, match=said):
        TwoFourConfig(**given)


def test_transformers_finds_config_and_quantizer_by_their_name(caplog):
    found = AutoQuantizationConfig.from_dict({"quant_method": "twofour", "dtype": "int8", "magic": 1})
    assert isinstance(found, TwoFourConfig) and found.dtype == "int8" and found.config_key
    assert "magic not known" in caplog.text
    assert isinstance(AutoHfQuantizer.from_config(found, pre_quantized=True), TwoFourQuantizer)


def test_a_config_travels_as_json_without_what_is_over_when_a_model_is_saved():
    options = {"prune": "2:4", "data": iter(["one"]), "skip": "pooler", "batch": 4, "packed": True}
    config = TwoFourConfig("bfloat16", embeddings=torch.int8, **options)
    said = json.loads(config.to_json_string())
    assert said == {
        "quant_method": "twofour",
        "dtype": "bfloat16",
        "memory": None,
        "embeddings": "int8",
        "graph": "auto",
        "batch": 4,
        "length": 32,
        "packed": True,
    }
    again = TwoFourConfig.from_dict(said)
    assert (again.dtype, again.batch, again.packed, again.prune) == ("bfloat16", 4, True, None)
    assert TwoFourConfig.from_dict(said, return_unused_kwargs=True, dtype="int8")[1] == {"dtype": "int8"}


def test_copies_share_data_that_cannot_be_copied():
    config = TwoFourConfig(prune="2:4", data=(text for text in ["one"]))
    assert copy.deepcopy({"config": config})["config"].data is config.data


def test_without_transformers_the_import_says_what_to_install():
    code = """
import sys
sys.modules["transformers"] = None
import twofour
try:
    import twofour.integrations
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "twofour[hf]" in run.stdout


def test_auto_is_no_criterion_of_its_own() -> None:
    assert TwoFourConfig(prune="2:4", criterion="auto").criterion is None
    with pytest.raises(RecipeError, match="the text is not a criterion"):
        TwoFourConfig(prune="2:4", criterion="autos")
