"""Which links of a slice a collective's bytes go over, and how long the busiest takes.

A slice is a torus or a part of one: each chip has a link to its neighbour on either side of every
direction. How many of them lie within a collective's group depends on where the mesh puts it: four
chips in a square have two each, the ends of a row one.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

Place = tuple[int, ...]
Groups = tuple[tuple[int, ...], ...]

_ROUND = {2: 16, 3: 4}  # directions of the torus: chips in a row that closes to a ring


@dataclasses.dataclass(frozen=True)
class Torus:
    """A slice's chips.

    Attributes:
        shape: chips in each direction.
        places: of the devices of a program, in the mesh's order.
    """

    shape: tuple[int, ...]
    places: tuple[Place, ...]

    def closes(self, direction: int) -> bool:
        """Whether the last chip in a direction has a link to the first.

        v5e and v6e: rows of 16. v5p: every direction, of a slice that is made of 4 x 4 x 4 blocks.
        """
        unit = _ROUND[len(self.shape)]
        if unit == 16:
            return self.shape[direction] == unit
        return all(size % unit == 0 for size in self.shape)

    def neighbours(self, place: Place) -> Iterator[Place]:
        """The chips that one has a link to."""
        for direction, size in enumerate(self.shape):
            for step in (-1, 1):
                there = place[direction] + step
                if self.closes(direction):
                    there %= size
                if 0 <= there < size:
                    yield (*place[:direction], there, *place[direction + 1 :])

    def route(self, source: Place, target: Place) -> Iterator[tuple[Place, Place]]:
        """The links of the way, one direction after the other, each the shorter way round."""
        here = source
        for direction, size in enumerate(self.shape):
            way = target[direction] - source[direction]
            if self.closes(direction) and 2 * abs(way) > size:
                way -= size if way > 0 else -size
            for _ in range(abs(way)):
                there = (here[direction] + (1 if way > 0 else -1)) % size
                step = (*here[:direction], there, *here[direction + 1 :])
                yield here, step
                here = step


def link_share(kind: str, groups: Groups, torus: Torus) -> float:
    """What the busiest link carries of the bytes that a chip sends, all groups at once.

    - Pairs (`collective-permute`): each goes its way; links that several share carry the sum.
    - Exchanges (all-to-all): as pairs, every member sending each other one an equal part.
    - The others move in rings: where the group's chips are neighbours, over all links that each
      has within the group, of which the chip with the fewest decides; else both ways round the
      members in their order, along the ways between them.

    Args:
        kind: of the collective.
        groups: of devices by number; of `collective-permute` sources and targets.
        torus: where the devices are.
    """
    members = [[torus.places[n] for n in group] for group in groups]
    if kind == "collective-permute":
        return _busiest(torus, dict.fromkeys(((a, b) for a, b in members), 1.0))
    if kind.endswith("all-to-all"):
        pairs = itertools.chain(*(itertools.permutations(group, 2) for group in members))
        return _busiest(torus, dict.fromkeys(pairs, 1 / (len(groups[0]) - 1)))
    if len(groups[0]) > 2 and all(_is_joined(torus, group) for group in members):
        return 1 / min(
            len({n for n in torus.neighbours(place) if n in group})
            for group in members
            for place in group
        )
    return _busiest(torus, _round_and_back(members))


def _round_and_back(members: Iterable[Sequence[Place]]) -> dict[tuple[Place, Place], float]:
    """What each sends the next one and the one before."""
    sent: dict[tuple[Place, Place], float] = defaultdict(float)
    for group in members:
        for a, b in zip(group, (*group[1:], group[0]), strict=True):
            sent[a, b] += 0.5
            sent[b, a] += 0.5
    return sent


def _busiest(torus: Torus, sent: Mapping[tuple[Place, Place], float]) -> float:
    load: dict[tuple[Place, Place], float] = defaultdict(float)
    for (source, target), share in sent.items():
        for link in torus.route(source, target):
            load[link] += share
    return max(load.values(), default=0.0)


def _is_joined(torus: Torus, group: Sequence[Place]) -> bool:
    """Whether links within the group lead from each chip to all others."""
    left, reached = set(group), [group[0]]
    left.discard(group[0])
    while reached:
        found = {n for n in torus.neighbours(reached.pop()) if n in left}
        left -= found
        reached += found
    return not left
