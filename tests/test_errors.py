import pickle

from twofour.errors import KernelError, TwofourError


def test_the_form_of_a_message() -> None:
    error = KernelError("it cannot run", got="this", wanted="that", remedy="the other", reasons=["a: no", "b: no"])
    assert str(error.for_layer("fc")) == (
        "layer `fc`: it cannot run\n  reason  a: no\n  reason  b: no\n"
        "  got     this\n  wanted  that\n  try     the other"
    )
    assert error.for_layer("other").layer == "fc", "the innermost name stays"
    assert "wanted  that" in repr(error)


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(KernelError("it cannot run", got="this", layer="fc")))
    assert isinstance(error, TwofourError)
    assert (str(error), error.got, error.layer) == ("layer `fc`: it cannot run\n  got     this", "this", "fc")
