"""The table digest -> number of native/ghost, against a dict."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgpu.host.native import Catalogue, Mover, MoverError, Status


@pytest.fixture
def catalogue(mover: Mover) -> Iterator[Catalogue]:
    catalogue = Catalogue(mover, 0)
    yield catalogue
    catalogue.close()


def matched_by_a_dict(known: dict[bytes, int], digests: numpy.ndarray, first: int) -> list[int]:
    return [known.setdefault(row.tobytes(), first + i) for i, row in enumerate(digests)]


def digests_of(rows: list[bytes]) -> numpy.ndarray:
    return numpy.frombuffer(b"".join(rows), numpy.uint8).reshape(-1, 16)


# Digests that differ in single bytes anywhere, far less even than real ones, and all zeros.
crowded = st.builds(
    lambda place, value: bytes(place) + bytes([value]) + bytes(15 - place),
    st.integers(0, 15),
    st.integers(0, 9),
)
batches = st.lists(
    st.tuples(st.lists(crowded | st.binary(min_size=16, max_size=16)), st.integers(0, 2**40)),
    max_size=6,
)


@given(batches=batches)
def test_numbers_are_those_of_a_dict(mover: Mover, batches: list[tuple[list[bytes], int]]) -> None:
    catalogue, known = Catalogue(mover, 0), {}
    for rows, first in batches:
        digests = digests_of(rows)
        expected = matched_by_a_dict(known, digests, first)
        assert catalogue.match(digests, first).tolist() == expected
    catalogue.close()


@pytest.mark.parametrize("expected", [0, 1000, 100_000])
def test_it_grows_past_what_was_expected(mover: Mover, expected: int) -> None:
    catalogue, known = Catalogue(mover, expected), {}
    random = numpy.random.default_rng(expected)
    distinct = random.integers(0, 256, (30_000, 16), numpy.uint8)
    for turn in range(4):
        digests = distinct[random.integers(0, 30_000, 20_000)]
        first = turn * 1_000_000
        assert catalogue.match(digests, first).tolist() == matched_by_a_dict(known, digests, first)
    catalogue.close()


def test_many_digests_are_matched_by_several_threads(mover: Mover) -> None:
    random = numpy.random.default_rng(3)
    distinct = random.integers(0, 256, (150_000, 16), numpy.uint8)
    catalogue, known = Catalogue(mover, 200_000), {}
    for turn in range(3):
        digests = distinct[random.integers(0, len(distinct), 180_000)]
        first = turn * 1_000_000
        assert catalogue.match(digests, first).tolist() == matched_by_a_dict(known, digests, first)
    catalogue.close()


def test_digests_that_share_a_slot_and_a_tag_are_told_apart(catalogue: Catalogue) -> None:
    # The tag is the upper half of low + high: a borrow between them leaves it as it is.
    rows = [
        (low.to_bytes(8, "little") + high.to_bytes(8, "little"))
        for low, high in ((i << 32, (1000 - i) << 32) for i in range(1000))
    ]
    digests = digests_of(rows)
    assert catalogue.match(digests, 0).tolist() == list(range(1000))
    assert catalogue.match(digests, 5000).tolist() == list(range(1000))


def test_numbers_may_be_as_large_as_64_bits(catalogue: Catalogue) -> None:
    digests = digests_of([bytes(16), bytes(15) + b"\1"])
    assert catalogue.match(digests, 2**64 - 3).tolist() == [2**64 - 3, 2**64 - 2]
    with pytest.raises(MoverError) as caught:
        catalogue.match(digests, 2**64 - 2)
    assert caught.value.status is Status.ARGUMENT


def test_shapes_that_are_no_digests_are_refused(catalogue: Catalogue) -> None:
    assert catalogue.match(numpy.empty((0, 16), numpy.uint8), 0).shape == (0,)
    with pytest.raises(ValueError, match="shape"):
        catalogue.match(numpy.zeros(32, numpy.uint8), 0)
