"""Checks of the numbers that users give."""

import pytest

from animegamer_jax.errors import UserError, check_at_least, check_between


def test_numbers_in_range_and_no_number_pass():
    for value in (None, 2, 3, 2.5):
        check_at_least("--games", value, 2)
    for value in (None, 0, 7):
        check_between("--steps", value, 0, 7)


def test_numbers_out_of_range_are_named():
    with pytest.raises(UserError, match=r"^--games 1: expected 2 or more$"):
        check_at_least("--games", 1, 2)
    for value in (-1, 8):
        with pytest.raises(
            UserError, match=rf"^--steps: expected a whole number, 0 to 7, found {value}$"
        ):
            check_between("--steps", value, 0, 7)
