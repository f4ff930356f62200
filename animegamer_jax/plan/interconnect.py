"""The links between the chips of a slice, and the load of the busiest one in a collective.

A slice is a torus or a part of one: each chip has a link to both neighbours in every dimension. The
number of links within a collective's group depends on the mesh: in a square of four chips each has
two, at the ends of a row one. The two devices of an Ironwood chip have a link of their own. Slices
have no links to each other, but a network.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

Position = tuple[int, ...]
Link = tuple[Position, Position]
Groups = tuple[tuple[int, ...], ...]

NETWORK_GB_PER_SECOND = 6.25  # each way, a chip's share of the network between slices: 50 Gb/s
_PAIR_LINKS = 12  # links of one device to a neighbour that the link within a chip stands for
_RING = {2: 16, 3: 4}  # by dimensions of the torus: chips in a row that closes to a ring


@dataclasses.dataclass(frozen=True)
class Torus:
    """The devices of a slice, or of several slices of the same shape.

    Attributes:
        shape: Number of chips in each dimension.
        positions: Positions of a program's devices, in the mesh's order: of the chip, then which
            of the chip's devices it is, then the number of the slice. Both may be left out.
        devices: Number of a chip's devices.
    """

    shape: tuple[int, ...]
    positions: tuple[Position, ...]
    devices: int = 1

    def is_ring(self, dimension: int) -> bool:
        """Returns whether the last chip in a dimension has a link to the first.

        v5e and v6e: rows of 16. v5p: every dimension of a slice made of 4 x 4 x 4 blocks.
        """
        unit = _RING[len(self.shape)]
        if unit == 16:
            return self.shape[dimension] == unit
        return all(size % unit == 0 for size in self.shape)

    def neighbours(self, position: Position) -> Iterator[Position]:
        """Yields the devices to which one has a link."""
        place = len(self.shape)
        if self.devices == 2:
            yield (*position[:place], 1 - position[place], *position[place + 1 :])
        for dimension, size in enumerate(self.shape):
            for step in (-1, 1):
                there = position[dimension] + step
                if self.is_ring(dimension):
                    there %= size
                if 0 <= there < size:
                    yield (*position[:dimension], there, *position[dimension + 1 :])

    def route(self, source: Position, target: Position) -> Iterator[Link]:
        """Yields the links of a route, dimension by dimension, each the shorter way round."""
        here = source
        for dimension, size in enumerate(self.shape):
            way = target[dimension] - source[dimension]
            if self.is_ring(dimension) and 2 * abs(way) > size:
                way -= size if way > 0 else -size
            for _ in range(abs(way)):
                there = (here[dimension] + (1 if way > 0 else -1)) % size
                step = (*here[:dimension], there, *here[dimension + 1 :])
                yield here, step
                here = step
        place = len(self.shape)
        if self.devices == 2 and here[place] != target[place]:
            yield here, (*here[:place], target[place], *here[place + 1 :])

    def width(self, link: Link) -> int:
        """Returns how many links to a neighbour a link stands for."""
        source, target = link
        same = source[: len(self.shape)] == target[: len(self.shape)]
        return _PAIR_LINKS if same else 1


def link_share(kind: str, groups: Groups, torus: Torus) -> float:
    """Returns the load of the busiest link, over the bytes that a chip sends; all groups at once.

    - Pairs of source and target (`collective-permute`) take their routes; shared links carry the
      sum.
    - Exchanges (all-to-all) are pairs in which every member sends an equal part to each other one.
    - The others move in rings. If a group's chips are neighbours, they use all links within the
      group, and the chip with the fewest links decides; else they use the routes between the
      members in their order, in both directions.
    """
    members = [[torus.positions[n] for n in group] for group in groups]
    if kind == "collective-permute":
        return _busiest(torus, dict.fromkeys(((a, b) for a, b in members), 1.0))
    if kind.endswith("all-to-all"):
        pairs = itertools.chain(*(itertools.permutations(group, 2) for group in members))
        return _busiest(torus, dict.fromkeys(pairs, 1 / (len(groups[0]) - 1)))
    if len(groups[0]) > 2 and all(_is_connected(torus, group) for group in members):
        return 1 / min(
            len(set(torus.neighbours(position)) & set(group))
            for group in members
            for position in group
        )
    return _busiest(torus, _both_ways_round(members))


def _both_ways_round(
    members: Iterable[Sequence[Position]],
) -> dict[Link, float]:
    """Returns the shares that each member sends to the next and to the previous one."""
    sent: dict[Link, float] = defaultdict(float)
    for group in members:
        for a, b in zip(group, (*group[1:], group[0]), strict=True):
            sent[a, b] += 0.5
            sent[b, a] += 0.5
    return sent


def _busiest(torus: Torus, sent: Mapping[Link, float]) -> float:
    load: dict[Link, float] = defaultdict(float)
    for (source, target), share in sent.items():
        for link in torus.route(source, target):
            load[link] += share
    return max((share / torus.width(link) for link, share in load.items()), default=0.0)


def _is_connected(torus: Torus, group: Sequence[Position]) -> bool:
    """Returns whether links within the group connect all its chips."""
    left, reached = set(group), [group[0]]
    left.discard(group[0])
    while reached:
        found = {n for n in torus.neighbours(reached.pop()) if n in left}
        left -= found
        reached += found
    return not left
