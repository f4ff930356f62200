"""Subscriptions to games: every open page of a game hears at once that something has changed."""

import asyncio
import collections
import contextlib
import threading
from collections.abc import Iterator


class Hub:
    """Wakes whoever follows a game, from any thread.

    What has changed is not sent along: a follower reads the game again, so a slow one misses
    nothing and nothing waits for it.
    """

    def __init__(self) -> None:
        self._followers: dict[str, set[Follower]] = collections.defaultdict(set)
        self._versions: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self.closed = False

    def changed(self, game: str) -> None:
        """Says that a game's turns or settings have changed."""
        with self._lock:
            if game in self._followers:
                self._versions[game] += 1
        self.wake(game)

    def wake(self, game: str) -> None:
        """Says that the progress of a game's turn has changed."""
        with self._lock:
            followers = list(self._followers.get(game, ()))
        for follower in followers:
            follower.wake()

    def version(self, game: str) -> int:
        """Returns a number that grows with each change of a game that somebody follows."""
        return self._versions.get(game, 0)

    @contextlib.contextmanager
    def follow(self, game: str) -> Iterator["Follower"]:
        """Follows a game within the block, which runs in an event loop."""
        follower = Follower()
        with self._lock:
            self._followers[game].add(follower)
        try:
            yield follower
        finally:
            with self._lock:
                self._followers[game].discard(follower)
                if not self._followers[game]:
                    del self._followers[game]
                    self._versions.pop(game, None)

    def close(self) -> None:
        """Ends all subscriptions."""
        self.closed = True
        with self._lock:
            followers = [one for some in self._followers.values() for one in some]
        for follower in followers:
            follower.wake()


class Follower:
    """One who follows a game; made in an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Wakes it, from any thread."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self, seconds: float) -> bool:
        """Waits until it is woken; returns False after `seconds`."""
        try:
            await asyncio.wait_for(self._woken.wait(), seconds)
        except TimeoutError:
            return False
        self._woken.clear()
        return True
