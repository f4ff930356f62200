"""The turns that wait: clients take turns, whatever number of requests each of them has."""

import collections
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

R = TypeVar("R")


class FairQueue(Generic[R]):
    """Requests in the order in which they are taken: the first of each client, then the second.

    The client who was served last comes last. A client's own requests stay in order. Not locked:
    the engine holds its lock.

    Args:
        client_of: Returns the client of a request.
    """

    def __init__(self, client_of: Callable[[R], str]):
        self._client_of = client_of
        self._clients: collections.OrderedDict[str, list[R]] = collections.OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[R]:
        rounds = itertools.zip_longest(*self._clients.values())
        return (request for row in rounds for request in row if request is not None)

    def count(self, client: str) -> int:
        """Returns how many requests of a client wait."""
        return len(self._clients.get(client, ()))

    def append(self, request: R) -> None:
        self._clients.setdefault(self._client_of(request), []).append(request)

    def remove(self, request: R) -> None:
        """Takes a request out; its client comes after the others from now on.

        Raises:
            ValueError: It does not wait.
        """
        waiting = self._clients.get(self._client_of(request), [])
        waiting.remove(request)
        if waiting:
            self._clients.move_to_end(self._client_of(request))
        else:
            del self._clients[self._client_of(request)]

    def clear(self) -> None:
        self._clients.clear()
