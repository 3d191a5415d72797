"""Low bits: every width and number system, bit planes by hand, every pattern, files; hostile values are refused."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import twofour
from tests.turns import in_turn
from twofour.errors import PackingError
from twofour.export import Contents
from twofour.export.file import read, write
from twofour.packing import Header, Packed, encodings, pack
from twofour.packing.encodings import LOW_BITS, Bits
from twofour.patterns import DENSE, Block, parse

NAMES = [encoding.name for encoding in LOW_BITS]
PATTERNS = ["dense", "2:4", "1:4", "4:2:8", "block:3x5@0.5"]


def bits(name: str) -> Bits:
    found = encodings.get(name)
    assert isinstance(found, Bits)
    return found


def whole(name: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Any values of an encoding, int16 (rows, columns)."""
    encoding = bits(name)
    codes = torch.randint(encoding.largest_code + 1, (rows, columns), generator=torch.Generator().manual_seed(seed))
    return (codes * encoding.alpha + encoding.beta).to(torch.int16)


def test_the_levels_of_every_encoding() -> None:
    for p in range(1, 9):
        assert bits(f"u{p}").bounds == (0, 2**p - 1)
        assert bits(f"s{p}").bounds == (-(2 ** (p - 1)), 2 ** (p - 1) - 1)
        assert bits(f"b{p}").bounds == (1 - 2**p, 2**p - 1) and bits(f"b{p}").alpha == 2
        assert not bits(f"b{p}").has_zero and bits(f"u{p}").has_zero
    assert bits("ternary").bounds == bits("ternary5").bounds == (-1, 1)
    assert len(NAMES) == 26


def test_planes_of_a_small_weight() -> None:
    """Codes 0 1 2 3 of s2 are -2 -1 0 1; plane 0 first, value i in bit i % 8 of byte i / 8."""
    weight = torch.tensor([[-2, -1, 0, 1, 1, 1, 1, 1, -1, 0]], dtype=torch.int8)
    packed = pack(weight, "dense", "s2")
    assert packed.values.tolist() == [[0b11111010, 0b01, 0b11111100, 0b10]]
    assert packed.indices.shape == (1, 0) and packed.scales is None
    assert torch.equal(packed.unpack(), weight.to(torch.int16))
    signs = pack(torch.tensor([[1, -1, -1, 1]], dtype=torch.int8), "dense", "b1")
    assert signs.values.tolist() == [[0b1001]]
    three = torch.tensor([[-1, 0, 1, 1, -1, 1]], dtype=torch.int8)  # codes 0 1 2 2 0, 2
    assert pack(three, "dense", "ternary5").values.tolist() == [[0 + 3 + 2 * 9 + 2 * 27, 2]]
    assert pack(three, "dense", "ternary").values.tolist() == [[0b000010, 0b101100]]


@given(st.sampled_from(NAMES), st.sampled_from(PATTERNS), st.integers(1, 5), st.integers(1, 37), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_whole_weights_come_back(name: str, pattern: str, rows: int, columns: int, seed: int) -> None:
    rule = DENSE if pattern == "dense" else parse(pattern)
    rows, columns = (4 * rows, 8 * columns) if pattern == "4:2:8" else (rows, columns * rule.group)
    weight = whole(name, rows, columns, seed)
    if pattern != "dense":
        if not bits(name).has_zero:  # kept values are none, pruned ones are
            weight = torch.where(weight == 0, weight + 1, weight)
        weight = weight * rule.project(torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)))
    packed = pack(weight, pattern, name)
    packed.validate()
    assert packed.header.pattern == rule.name and packed.values.dtype == torch.uint8
    assert torch.equal(packed.unpack(), weight)
    again = replace(packed, header=Header.from_dict(packed.header.to_dict()))
    assert torch.equal(again.unpack(), weight)


@in_turn("name", NAMES)
@in_turn("count", [1, 5, 7, 8, 9, 64, 101])
def test_codes_and_sizes(name: str, count: int) -> None:
    encoding, values = bits(name), whole(name, 3, count, count)
    stored = encoding.store(values)
    assert stored.shape == (3, encoding.width(count))
    size = -(-count // 5) if name == "ternary5" else encoding.bits * -(-count // 8)
    assert encoding.width(count) == size
    codes = encoding.read_codes(stored, count)
    assert torch.equal(codes.short() * encoding.alpha + encoding.beta, values)
    assert torch.equal(encoding.codes_of(values), codes) and encoding.flaw(stored, count) is None


@in_turn("name", NAMES)
@in_turn("pattern", ["dense", "2:4", "block:8x3@0.6"])
@in_turn("group", [None, 12])
def test_floats_are_rounded_to_the_nearest_level(name: str, pattern: str, group: int | None) -> None:
    rule = DENSE if pattern == "dense" else parse(pattern)
    weight = torch.randn(9, 48, generator=torch.Generator().manual_seed(3)) + 0.1
    weight = weight * rule.project(weight, absolute=True)
    packed = pack(weight, pattern, name, group=group)
    packed.validate()
    assert packed.scales is not None and packed.scales.shape == (9, 48 // group if group else 1)
    found = packed.unpack()
    assert found.dtype == torch.float32 and (found[weight == 0] == 0).all()
    encoding, scales = bits(name), packed.scales.repeat_interleave(group or 48, 1)
    zeros = 0 if packed.zeros is None else packed.zeros.repeat_interleave(group or 48, 1)
    least, most = ((bound - zeros) * scales for bound in encoding.bounds)
    inside = (weight >= least) & (weight <= most)
    assert ((found - weight).abs() <= 0.501 * encoding.alpha * scales)[inside & (weight != 0)].all()


def test_scales_of_signs_and_ternary_are_means() -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for name in ("b1", "ternary", "ternary5"):
        packed = pack(weight, "dense", name)
        torch.testing.assert_close(packed.scales, weight.abs().mean(1, keepdim=True))
    torch.testing.assert_close(pack(weight, "dense", "s4").scales, weight.abs().amax(1, keepdim=True) / 7)
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    asymmetric = pack(weight, "dense", "s3", symmetric=False)
    torch.testing.assert_close(asymmetric.scales, (high - low) / 7)
    assert asymmetric.zeros is not None and (asymmetric.zeros.abs() <= 4).all()


@pytest.mark.parametrize("name", ["b1", "b3", "ternary", "s2"])
def test_runs_of_zeros_and_of_what_no_sum_holds(name: str) -> None:
    """Levels without a zero have no more than the least float there; a mean is found of what float32 cannot add up."""
    none = pack(torch.zeros(2, 9), "dense", name).unpack()
    assert none.abs().max() <= 7 * torch.finfo(torch.float32).tiny
    huge = pack(torch.full((2, 9), 3e38), "dense", name).unpack()
    assert torch.allclose(huge, torch.full((2, 9), 3e38))


def test_convolutions_pack_along_input_channels() -> None:
    weight = whole("s3", 4 * 9, 6).view(4, 3, 3, 6).movedim(-1, 1)
    packed = pack(weight, "dense", "s3", axis=1)
    assert packed.values.shape == (4, 3 * 7) and torch.equal(packed.unpack(), weight)  # an output's 54 values in a row
    of_outputs = replace(packed, scales=torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    of_outputs.validate()
    assert torch.equal(of_outputs.unpack(), weight * torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1, 1))
    with pytest.raises(PackingError, match=re.escape("(36, 1) or (4, 1)")):
        replace(packed, scales=torch.ones(12, 1)).validate()


def test_what_the_levels_have_not_is_refused() -> None:
    with pytest.raises(PackingError, match=r"cannot be written as s2(.|\n)*whole numbers from -2 to 1"):
        pack(torch.full((1, 8), 2, dtype=torch.int8), "dense", "s2")
    with pytest.raises(PackingError, match=r"cannot be written as b2(.|\n)*odd numbers from -3 to 3"):
        pack(torch.full((1, 8), 2, dtype=torch.int8), "dense", "b2")
    sparse = torch.tensor([[1.0, 0, 0, 0, 0, 2, 3, 0]])
    with pytest.raises(PackingError, match=r"b1(.|\n)*1 zeros among the values that 2:4 keeps"):
        pack(sparse, "2:4", "b1")
    with pytest.raises(PackingError, match="has no zero points"):
        pack(torch.ones(1, 8), "dense", "b3", symmetric=False)
    with pytest.raises(PackingError, match="groups with a scale each"):
        pack(torch.ones(1, 8), "dense", "s3", group=3)
    with pytest.raises(PackingError, match="no s3 form"):
        pack(torch.ones(1, 8), "4:8-pairs", "s3")
    with pytest.raises(PackingError, match="pattern dense has no"):
        pack(torch.ones(1, 64), "dense", "float32")
    with pytest.raises(PackingError, match="cannot be written in this dtype"):
        pack(torch.ones(1, 8, dtype=torch.int32), "dense", "s3")


def test_dense_is_no_pattern_to_prune_by() -> None:
    with pytest.raises(twofour.errors.PatternError, match="not a sparsity pattern"):
        twofour.prune(nn.Linear(16, 16), "dense")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("s3", lambda v: v.fill_(255), "bits behind 13 s3 values"),
        ("b1", lambda v: v[:, -1].fill_(0x20), "bits behind 13 b1 values"),
        ("ternary", lambda v: v.fill_(0x0F), "a ternary code of 3"),
        ("ternary5", lambda v: v[0, 0].fill_(243), "below 3\\^5"),
        ("ternary5", lambda v: v[0, -1].fill_(27), "more than 13 ternary codes"),
    ],
)
def test_damaged_values_are_refused(name: str, change, said: str) -> None:
    packed = pack(whole(name, 2, 13), "dense", name)
    packed.validate()
    change(packed.values)
    with pytest.raises(PackingError, match=said):
        packed.validate()


def test_damaged_sizes_and_scales_are_refused() -> None:
    packed: Packed = pack(torch.randn(4, 16), "dense", "s2")
    changes = {
        "its values": replace(packed, values=packed.values[:, 1:].contiguous()),
        "its indices": replace(packed, indices=torch.zeros(4, 1, dtype=torch.uint8)),
        "positive finite": replace(packed, scales=packed.scales * float("nan")),
        "torch.float32": replace(packed, scales=packed.scales.double()),
        "from -2 to 1": replace(packed, zeros=torch.full((4, 1), 5.0)),
    }
    for said, damaged in changes.items():
        with pytest.raises(PackingError, match=said):
            damaged.validate()
    with pytest.raises(PackingError, match="positive finite"):
        replace(packed, scales=torch.zeros(4, 1)).validate()
    for rows in (0, 3, 8):
        with pytest.raises(PackingError, match="do not fit"):
            replace(packed, scales=torch.ones(rows, 1)).unpack()
    for shape in ((8, 4, 0), (8, 0, 4)):
        with pytest.raises(PackingError, match="positive sizes"):
            _ = Header("dense", "s2", shape, 1).format
    fields = packed.header.to_dict()
    for wrong in ({"dtype": "s9"}, {"dtype": "w2"}, {"pattern": "4:8-pairs"}, {"dtype": "float32"}, {"group": 5}):
        with pytest.raises(PackingError, match="header"):
            Header.from_dict({**fields, **wrong})


@pytest.mark.parametrize("pattern", ["dense", "2:4", "block:4x8@0.5"])
@pytest.mark.parametrize("name", ["b1", "s2", "ternary", "ternary5", "u4"])
def test_a_file_holds_them_and_load_reads_it(tmp_path, name: str, pattern: str) -> None:
    rule = DENSE if pattern == "dense" else parse(pattern)
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    packed = pack(weight * rule.project(weight, absolute=True), pattern, name)
    path = tmp_path / "low.safetensors"
    write(path, Contents({"bias": torch.zeros(8)}, {"weight": packed}, {}, {}))
    found = read(path).packed["weight"]
    assert torch.equal(found.unpack(), packed.unpack()) and found.header == packed.header
    layer = twofour.load(path, nn.Linear(32, 8), tokens=(1,))
    x = torch.randn(3, 32)
    torch.testing.assert_close(layer(x), x @ packed.unpack().T, atol=1e-4, rtol=1e-4)
    report = twofour.check(path)
    assert (report.layers[0].promised is None) == (rule is DENSE)


def test_bits_are_less_than_a_byte() -> None:
    for name, size in (("b1", 1 / 8), ("s2", 2 / 8), ("ternary5", 1 / 5), ("s4", 4 / 8)):
        packed = pack(whole(name, 4, 1000), "dense", name)
        assert packed.nbytes == 4 * 1000 * size
    assert isinstance(parse("block:4x4@0.5"), Block)
