"""Links of a slice that a collective's bytes go over."""

import itertools

import pytest

from animegamer_jax.plan.interconnect import Torus, link_share

SQUARES = (((0, 0), (0, 1), (1, 0), (1, 1)), ((0, 2), (0, 3), (1, 2), (1, 3)))


def torus(*shape: int, order=None) -> Torus:
    places = tuple(itertools.product(*map(range, shape)))
    return Torus(shape, places if order is None else order)


@pytest.mark.parametrize(
    ("shape", "place", "count"),
    [
        ((2, 4), (0, 0), 2),
        ((2, 4), (1, 1), 3),
        ((4, 4), (0, 3), 2),  # of a v5e or v6e slice only rows of 16 close
        ((16, 16), (0, 0), 4),
        ((8, 16), (0, 0), 3),
        ((4, 4, 4), (0, 0, 3), 6),
        ((2, 2, 4), (0, 0, 0), 3),  # less than a block of 4 x 4 x 4
        ((2, 2, 2), (1, 1, 1), 3),
    ],
)
def test_neighbours(shape, place, count):
    found = list(torus(*shape).neighbours(place))
    assert len(found) == len(set(found)) == count
    assert all(0 <= n < size for there in found for n, size in zip(there, shape, strict=True))


def test_a_square_has_two_links_a_row_one():
    squares = torus(2, 4, order=SQUARES[0] + SQUARES[1])
    rows = torus(2, 4)
    halves = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert link_share("all-gather", halves, squares) == 1 / 2
    assert link_share("all-gather", halves, rows) == 1  # its ends
    assert link_share("all-reduce", (tuple(range(8)),), rows) == 1 / 2
    closed = torus(4, 4, 4)
    assert link_share("all-gather", ((0, 1, 2, 3),), closed) == 1 / 2
    assert link_share("all-gather", (tuple(range(16)),), closed) == 1 / 4
    assert link_share("all-gather", (tuple(range(64)),), closed) == 1 / 6


def test_two_devices_of_a_chip():
    """They have a link of their own, which is wider; so have the devices of each other chip."""
    places = tuple(itertools.product(range(2), range(2), range(1), range(2)))
    both = Torus((2, 2, 1), places, 2)
    assert set(both.neighbours((0, 0, 0, 1))) == {(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 0, 1)}
    assert link_share("collective-permute", ((0, 1),), both) == 1 / 12
    assert link_share("collective-permute", ((0, 3),), both) == 1, "to the next chip, then across"
    assert link_share("all-gather", (tuple(range(8)),), both) == 1 / 3
    assert link_share("all-gather", ((0, 2, 4, 6), (1, 3, 5, 7)), both) == 1 / 2


def test_slices_have_no_links_to_each_other():
    places = tuple((*place, n) for n in range(2) for place in itertools.product(range(2), range(2)))
    two = Torus((2, 2), places)
    assert link_share("all-gather", ((0, 1, 2, 3), (4, 5, 6, 7)), two) == 1 / 2


def test_pairs_share_the_links_of_their_ways():
    row = torus(1, 4)
    assert link_share("all-gather", ((0, 1), (2, 3)), row) == 1
    assert link_share("all-gather", ((0, 2), (1, 3)), row) == 2  # both over the middle
    assert link_share("collective-permute", ((0, 1), (1, 2), (2, 3)), row) == 1
    assert link_share("collective-permute", ((0, 3), (1, 2)), row) == 2
    assert link_share("collective-permute", ((0, 0),), row) == 0
    assert link_share("collective-permute", ((0, 15),), torus(1, 16)) == 1  # the short way round


def test_an_exchange_is_all_its_pairs():
    """Of a row of four: over the middle 2 x 2 pairs each way, a third of the bytes each."""
    assert link_share("all-to-all", ((0, 1, 2, 3),), torus(1, 4)) == pytest.approx(4 / 3)
    # A square: to the neighbour, to the one across by way of it, and another's the same.
    assert link_share("all-to-all", ((0, 1, 2, 3),), torus(2, 2)) == pytest.approx(2 / 3)


def test_chips_that_are_no_neighbours_move_in_a_ring():
    """0, 2 and 4 of a row: between two of them both halves, and those that go round."""
    assert link_share("all-gather", ((0, 2, 4),), torus(1, 5)) == pytest.approx(1)
    assert link_share("all-gather", ((0, 2, 4), (1, 3, 5)), torus(1, 6)) == pytest.approx(2)
