"""Samples that say which they are, and what was drawn for them."""

from typing import NamedTuple

import grain
import numpy as np


class Number(NamedTuple):
    film: np.ndarray
    number: np.ndarray
    drawn: np.ndarray


def numbers(count: int, *, film: int = 0) -> grain.MapDataset:
    def draw(number: int, rng: np.random.Generator) -> Number:
        return Number(*(np.asarray(x, np.int32) for x in (film, number, rng.integers(1 << 20))))

    return grain.MapDataset.range(count).random_map(draw, seed=5)


def take(iterator, count: int) -> list:
    return [next(iterator) for _ in range(count)]
