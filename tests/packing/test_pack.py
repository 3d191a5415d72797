import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.turns import in_turn
from twofour.errors import PackingError, PatternError
from twofour.packing import Header, Packed, encodings, kept, layout_header, pack, packed_bytes, read_layout_header
from twofour.patterns import NM, parse


def sparse(shape: tuple[int, ...], pattern: str, axis: int = -1, seed: int = 0) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).movedim(axis, -1).contiguous()
    weight *= parse(pattern).project(weight, absolute=True)
    return weight.movedim(-1, axis)


@in_turn("pair", list(itertools.combinations(range(4), 2)))
@in_turn("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_every_legal_code_round_trips(isa: str, pair: tuple[int, int], dtype: str) -> None:
    weight = torch.zeros(2, 12, dtype=encodings.get(dtype).dtype)
    weight[:, list(pair)] = torch.tensor([3, -7]).to(weight.dtype)
    packed = pack(weight, "2:4")
    # PTX ISA: low two bits = first kept position, high two bits = second; an all-zero group carries (0, 1).
    assert packed.indices[0, 0] & 0xF == pair[0] | pair[1] << 2
    assert packed.indices[0].tolist()[1] == 0b0100
    assert packed.values[0].tolist() == [3, -7, 0, 0, 0, 0]
    assert torch.equal(packed.unpack(), weight)


@in_turn("only", range(4))
def test_one_non_zero_still_carries_two_ascending_indices(isa: str, only: int) -> None:
    weight = torch.zeros(1, 4)
    weight[0, only] = 5.0
    packed = pack(weight, "2:4")
    first, second = int(packed.indices[0, 0]) & 3, int(packed.indices[0, 0]) >> 2
    assert first < second <= 3
    assert only in (first, second)
    assert {first, second} - {only} == {0 if only else 1}  # the explicit zero is the lowest free index
    assert torch.equal(packed.unpack(), weight)


@in_turn(
    ("pattern", "dtype", "ratio"),
    [("2:4", "float16", 0.5625), ("2:4", "bfloat16", 0.5625), ("2:4", "float32", 0.53125),
     ("2:4", "int8", 0.625), ("1:2", "tf32", 0.5625), ("4:8-pairs", "int4", 0.625)],
)  # fmt: skip
def test_sizes_are_those_of_the_paper(pattern: str, dtype: str, ratio: float) -> None:
    whole = dtype in ("int8", "int4")
    weight = sparse((32, 64), pattern)
    weight = (weight * 2).clamp(-8, 7).to(torch.int8) if whole else weight
    weight = weight * parse(pattern).project(weight, absolute=True)
    packed = pack(weight, pattern, dtype)
    bits = {"int8": 8, "int4": 4, "tf32": 32}.get(dtype) or encodings.get(dtype).dtype.itemsize * 8
    assert packed.nbytes == weight.numel() * bits / 8 * ratio
    assert torch.equal(packed.unpack(), weight.to(encodings.get(dtype).dtype))


@given(
    st.sampled_from(["2:4", "1:2", "4:8", "1:4", "8:16", "3:5", "4:8-pairs"]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8]),
    st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_round_trip_is_exact(pattern: str, rows: int, groups: int, dtype: torch.dtype, seed: int) -> None:
    rule = parse(pattern)
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, groups * rule.group, generator=generator) * 4).to(dtype)
    weight[torch.rand(weight.shape, generator=generator) < 0.3] = 0
    weight *= rule.project(weight, absolute=True)
    encoding = None
    if pattern.endswith("pairs"):
        weight, encoding = weight.to(torch.float32).clamp(-8, 7).to(torch.int8), "int4"
    packed = pack(weight, pattern, encoding)
    assert torch.equal(packed.unpack(), weight)
    assert torch.equal(replace(packed, header=Header.from_dict(packed.header.to_dict())).unpack(), weight)


@pytest.mark.parametrize(("shape", "axis"), [((8, 16), -1), ((8, 16, 3), 1), ((8, 16, 3, 5), 1), ((16, 8), 0)])
def test_convolutions_pack_along_input_channels(shape: tuple[int, ...], axis: int) -> None:
    weight = sparse(shape, "2:4", axis)
    packed = pack(weight, "2:4", axis=axis)
    assert packed.header.reduction == 16
    assert torch.equal(packed.unpack(), weight)


@pytest.mark.parametrize(("shape", "axis"), [((5, 7), -1), ((7, 5), 0), ((4, 6, 3), 1), ((4, 6, 3, 3), 1)])
def test_a_dense_weight_of_int8_is_its_whole_numbers_and_a_scale_a_row(shape: tuple[int, ...], axis: int) -> None:
    weight = torch.randn(shape)
    packed = pack(weight, "dense", "int8", axis=axis)
    assert packed.nbytes == weight.numel() + 4 * weight.numel() // weight.shape[axis] == packed_bytes(packed.header)
    packed.validate()
    back = replace(packed, header=Header.from_dict(packed.header.to_dict())).unpack()
    assert ((back - weight).abs() <= weight.abs().amax(axis, keepdim=True) / 253).all()
    whole = (weight * 20).round().clamp(-128, 127).to(torch.int8)
    assert torch.equal(pack(whole, "dense", axis=axis).unpack(), whole)


def test_strided_weights_pack_as_their_contiguous_copies() -> None:
    weight = sparse((12, 24), "2:4")
    wide = torch.full((24, 48), 7.0)
    wide[::2, ::2] = weight
    transposed = weight.t().contiguous().t()
    for view in (wide[::2, ::2], transposed):
        assert not view.is_contiguous()
        assert torch.equal(pack(view, "2:4").unpack(), weight)


def test_a_dense_weight_is_refused_with_its_first_group(isa: str) -> None:
    weight = sparse((4, 16), "2:4")
    weight[2, 8:12] = torch.tensor([1.0, 2.0, 3.0, 0.0])
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(PackingError, match=r"1 of 16 groups break it, the first at \(2, 8\)"):
            pack(weight.to(dtype), "2:4")


@in_turn("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(isa: str, bad: float) -> None:
    for dtype in (torch.float32, torch.float16):
        weight = torch.zeros(2, 8, dtype=dtype)
        weight[1, 5] = bad
        with pytest.raises(PatternError, match=r"at \(1, 5\)"):
            pack(weight, "2:4")


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_values_beyond_the_dtype_are_said_to_overflow_it(pattern: str) -> None:
    weight = torch.zeros(2, 8)
    weight[1, 5] = -70000.0
    with pytest.raises(PackingError, match=r"overflow float16(.|\n)*got +70000(.|\n)*<= 65504(.|\n)*bfloat16"):
        pack(weight, pattern, "float16")
    weight[1, 5] = torch.finfo(torch.float32).max
    with pytest.raises(PackingError, match="overflow bfloat16"):
        pack(weight, pattern, "bfloat16")
    weight[1, 5] = float("inf")
    with pytest.raises(PatternError, match="NaN or infinite"):
        pack(weight, pattern, "float16")


@in_turn("pattern", ["2:4", "4:8"])
@in_turn("bad", [float("nan"), float("inf"), float("-inf")])
@in_turn("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_non_finite_packed_values_are_refused(pattern: str, bad: float, dtype: torch.dtype) -> None:
    packed = pack(sparse((4, 16), pattern).to(dtype), pattern)
    packed.validate()
    packed.values[2, 3] = bad
    with pytest.raises(PackingError, match=r"not finite(.|\n)*1 values that are NaN or infinite(.|\n)*at \(2, 3\)"):
        packed.validate()


@pytest.mark.parametrize("place", [0, 1, 77, 65536, 524287])
def test_one_nan_among_many_values_is_seen(place: int) -> None:
    packed = pack(sparse((1024, 1024), "2:4"), "2:4")
    packed.values.view(-1)[place] = float("nan")
    with pytest.raises(PackingError, match="not finite"):
        packed.validate()


def test_a_header_whose_axis_has_half_a_group_is_refused() -> None:
    header = Header("2:4", "float32", (4, 6), 1)
    packed = Packed(header, torch.zeros(4, 2), torch.full((4, 1), 0b0100, dtype=torch.uint8))
    for call in (packed.validate, packed.unpack):
        with pytest.raises(PackingError, match=r"contradicts itself(.|\n)*\(4, 6\)(.|\n)*multiple of 4"):
            call()


@in_turn(
    ("weight", "pattern", "dtype"),
    [
        (torch.zeros(4, 8, dtype=torch.int32), "2:4", None),
        (torch.zeros(4, 8, dtype=torch.float64), "2:4", None),
        (torch.zeros(4, 8), "4:8-pairs", "int4"),
        (torch.zeros(4, 8, dtype=torch.int8), "2:4", "float16"),
        (torch.zeros(4, 8), "2:4", "tf32"),
        (torch.zeros(4, 8, dtype=torch.int8), "2:4", "int4"),
        (torch.zeros(4, 8), "4:8-pairs", None),
        (torch.zeros(4, 8), "2:4", "float8"),
        (torch.zeros(4, 8), "dense", "float32"),
        (torch.zeros(4, 32), "dense", "int4"),
    ],
)
def test_dtypes_without_a_form_are_refused(weight: torch.Tensor, pattern: str, dtype: str | None) -> None:
    with pytest.raises(PackingError, match="wanted"):
        pack(weight, pattern, dtype)


def test_int4_range_is_checked() -> None:
    weight = torch.zeros(1, 8, dtype=torch.int8)
    weight[0, :2] = torch.tensor([-9, 8])
    with pytest.raises(PackingError, match="from -9 to 8"):
        pack(weight, "4:8-pairs", "int4")


@given(st.integers(0, 255), st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_no_illegal_index_gets_through(byte: int, place: int) -> None:
    packed = pack(sparse((2, 32), "2:4"), "2:4")
    stream = packed.indices.clone()
    stream.view(-1)[place] = byte
    changed = Packed(packed.header, packed.values, stream)
    legal = all((code & 3) < (code >> 2) for code in (byte & 0xF, byte >> 4))
    if legal:
        changed.validate()
        assert parse("2:4").check(changed.unpack()).ok
    else:
        for call in (changed.unpack, changed.validate):
            with pytest.raises(PackingError, match="ascending"):
                call()


def test_padding_bits_and_sizes_are_checked() -> None:
    packed = pack(sparse((2, 12), "2:4"), "2:4")
    stream = packed.indices.clone()
    stream[1, 1] |= 0x40
    for call in ("unpack", "validate"):
        with pytest.raises(PackingError, match="padding bits"):
            getattr(Packed(packed.header, packed.values, stream), call)()
    for values, indices in [
        (packed.values[:, 1:], packed.indices),
        (packed.values, packed.indices[:1]),
        (packed.values.half(), packed.indices),
        (packed.values, packed.indices.to(torch.int8)),
    ]:
        with pytest.raises(PackingError, match="do not match its header"):
            Packed(packed.header, values, indices).unpack()


@in_turn(
    "change",
    [
        {"version": 2}, {"layout": "panels"}, {"dtype": "float8"}, {"pattern": "4:2"}, {"pattern": 3}, {"axis": 2},
        {"axis": -1}, {"axis": True}, {"shape": [8, 15]}, {"shape": [0, 16]}, {"shape": []}, {"shape": "8x16"},
        {"shape": [1 << 30, 1 << 30]}, {"shape": [8.0, 16]}, {"extra": 1},
    ],
)  # fmt: skip
def test_malformed_headers_are_refused(change: dict[str, object]) -> None:
    good = Header("2:4", "float32", (8, 16), 1).to_dict()
    assert Header.from_dict(good) == Header("2:4", "float32", (8, 16), 1)
    with pytest.raises(PackingError, match="malformed"):
        Header.from_dict({**good, **change})
    with pytest.raises(PackingError, match="malformed"):
        Header.from_dict([good])


def test_layout_headers_round_trip() -> None:
    data = layout_header("2:4", "float32", "panels", 384, 768)
    header = read_layout_header(data)
    assert (header.pattern, header.dtype, header.layout, header.shape) == ("2:4", "float32", "panels", (384, 768))
    assert read_layout_header(layout_header("dense", "float8", "cublas_fp8", 8, 8)).dtype == "float8"
    others = [layout_header("2:4", *form) for form in (("2:4", "panels", 4, 4), ("float32", "panels", 0, 4))]
    others.append(layout_header("2:4", "float32", "panels", 1 << 31, 1 << 31))
    for broken in (data[:-1], b"PK42" + data[4:], data[:4] + b"\x09\x00" + data[6:], *others):
        with pytest.raises(PackingError, match="malformed"):
            read_layout_header(broken)


@in_turn("dtype", [torch.float32, torch.bfloat16, torch.float16])
@in_turn("columns", [4, 8, 68, 256])
def test_kept_values_move_between_dense_and_packed_as_the_format_moves_them(dtype: torch.dtype, columns: int) -> None:
    scores = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns))
    keep = NM(2, 4).project(scores, absolute=True)
    packed = pack((scores * keep).to(dtype), "2:4")
    places = kept.places_of(keep)
    assert torch.equal(places.indices, packed.indices) and torch.equal(kept.mask_of(places), keep)
    wide = torch.randn(5, columns + 3).to(dtype)
    dense = wide[:, 1 : columns + 1]  # rows further apart than long
    want = packed.header.format.gather(dense.contiguous(), packed.positions())
    assert torch.equal(kept.gather(packed, dense), want)
    assert torch.equal(kept.scatter(packed), packed.unpack())
    assert torch.equal(kept.scatter(replace(packed, values=want)), torch.where(keep, dense, 0))
