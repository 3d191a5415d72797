"""How leaves make up an answer, copied and pickled."""

import copy
import pickle

import pytest
import torch
from torch.utils._pytree import tree_flatten

from twofour.capture import Structure


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
def test_an_answer_of_hugging_face_keeps_its_names(copied):
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="needs the extra [text]")
    given = outputs.BaseModelOutputWithPooling(last_hidden_state=torch.ones(2), pooler_output=torch.zeros(3))
    leaves, spec = tree_flatten({"answer": given, "none": None})
    again = copied(Structure(spec)).value(leaves)
    assert again["none"] is None and list(again["answer"].keys()) == ["last_hidden_state", "pooler_output"]
    assert again["answer"].pooler_output is given.pooler_output
