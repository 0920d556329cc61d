"""Layouts are sorted, aligned and tight; cuts are a partition at multiples of 64 bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeepo.chunks.layout import SLOT_ALIGNMENT_BYTES, Cut, Slot, align_up, cut_into_pieces, pack

sizes_lists = st.lists(st.integers(0, 500), max_size=12)
tensors = st.lists(st.tuples(st.integers(0, 600), st.sampled_from([1, 2, 4, 8, 16])), max_size=12)


@given(st.integers(0, 10_000), st.integers(1, 5000))
def test_align_up_is_the_least_multiple(nbytes: int, alignment: int) -> None:
    aligned = align_up(nbytes, alignment)
    assert aligned % alignment == 0
    assert nbytes <= aligned < nbytes + alignment


def test_align_up_defaults_to_a_vector_line() -> None:
    assert [align_up(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


@given(sizes_lists)
def test_slots_are_aligned_tight_and_inside(sizes: list[int]) -> None:
    layout = pack([(f"t{i}", n) for i, n in enumerate(sizes)])
    assert [(s.name, s.nbytes) for s in layout.slots] == [(f"t{i}", n) for i, n in enumerate(sizes)]
    end = 0
    for slot in layout.slots:
        assert slot.offset_bytes % SLOT_ALIGNMENT_BYTES == 0
        assert end <= slot.offset_bytes < end + SLOT_ALIGNMENT_BYTES
        end = slot.end_bytes
    assert end <= layout.nbytes < end + SLOT_ALIGNMENT_BYTES
    assert layout.nbytes == sum(align_up(n) for n in sizes)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=12), st.data())
def test_describe_names_exactly_what_is_touched(sizes: list[int], data: st.DataObject) -> None:
    layout = pack([(f"t{i}", n) for i, n in enumerate(sizes)])
    low = data.draw(st.integers(0, layout.nbytes))
    high = data.draw(st.integers(low + 1, layout.nbytes + 1))
    touched = [
        s.name
        for s in layout.slots
        if any(s.offset_bytes <= b < s.end_bytes for b in range(low, high))
    ]
    assert layout.describe(low, high) == (", ".join(touched) or "padding")


def test_describe_of_the_story() -> None:
    layout = pack([("weight", 100), ("bias", 12)])
    assert layout.slots == (Slot("weight", 0, 100), Slot("bias", 128, 12))
    assert layout.nbytes == 192
    assert layout.describe(0, 192) == "weight, bias"
    assert layout.describe(99, 128) == "weight"
    assert layout.describe(100, 128) == "padding"
    assert layout.describe(139, 150) == "bias"
    assert layout.describe(140, 192) == "padding"


@given(tensors, st.integers(0, 4000))
def test_every_element_is_in_exactly_one_cut(
    sizes: list[tuple[int, int]], piece_bytes: int
) -> None:
    numels, itemsizes = [n for n, _ in sizes], [i for _, i in sizes]
    pieces = cut_into_pieces(numels, itemsizes, piece_bytes)
    cuts = [cut for piece in pieces for cut in piece]
    assert all(pieces), "a piece without cuts"
    for index, numel in enumerate(numels):
        own = [cut for cut in cuts if cut.tensor == index]
        assert own, "a tensor is in no piece, not even an empty one"
        position = 0
        for cut in own:
            assert cut.start == position
            assert cut.numel > 0 or numel == 0
            position += cut.numel
        assert position == numel


@given(tensors, st.integers(0, 4000))
def test_pieces_are_small_and_cut_at_multiples(
    sizes: list[tuple[int, int]], piece_bytes: int
) -> None:
    pieces = cut_into_pieces([n for n, _ in sizes], [i for _, i in sizes], piece_bytes)
    limit = max(SLOT_ALIGNMENT_BYTES, piece_bytes)
    for piece in pieces:
        assert sum(align_up(c.numel * sizes[c.tensor][1]) for c in piece) <= limit
        for cut in piece:
            numel, itemsize = sizes[cut.tensor]
            assert cut.start * itemsize % SLOT_ALIGNMENT_BYTES == 0
            if cut.numel != numel:
                assert len(piece) == 1, "a part of a tensor shares its piece"
                assert align_up(numel * itemsize) > limit // 64 * 64, "cut although it fits"


@given(tensors, st.integers(64, 4000))
def test_small_tensors_share_pieces_as_far_as_they_fit(
    sizes: list[tuple[int, int]], piece_bytes: int
) -> None:
    """Two neighbouring pieces of whole tensors could not have been one."""
    limit = piece_bytes // 64 * 64
    numels, itemsizes = [n for n, _ in sizes], [i for _, i in sizes]
    if any(align_up(n * i) > limit for n, i in sizes):
        return
    pieces = cut_into_pieces(numels, itemsizes, piece_bytes)
    for piece, following in itertools.pairwise(pieces):
        nbytes = sum(align_up(numels[c.tensor] * itemsizes[c.tensor]) for c in piece)
        first = following[0].tensor
        assert nbytes + align_up(numels[first] * itemsizes[first]) > limit


def test_cuts_of_the_story() -> None:
    """A tensor larger than a piece is cut by itself, the small ones around it share a piece."""
    pieces = cut_into_pieces([10, 100, 12], [4, 4, 4], 128)
    assert pieces == [
        [Cut(1, 0, 32)],
        [Cut(1, 32, 32)],
        [Cut(1, 64, 32)],
        [Cut(1, 96, 4)],
        [Cut(0, 0, 10), Cut(2, 0, 12)],
    ]
    assert all(cut.start % 16 == 0 for piece in pieces for cut in piece)


def test_no_tensors_no_pieces() -> None:
    assert cut_into_pieces([], [], 64) == []
    assert pack([]).nbytes == 0


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        cut_into_pieces([1, 2], [4], 64)
