"""A vision-language model scores played games, 0 to 10 (PAPER section 4.2).

All systems' answers to one game are judged in one question, under neutral labels in an order drawn
for the game. Each valid answer is kept on disk under a digest of all that was asked, so the same
question is not paid for twice. A game without a valid answer is set aside with the reason, and the
others go on. The wording is our own: the paper's is not published.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from etils import epath

from animegamer_jax.bundle.config import to_json
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.judge.prompt import _LABELS, JudgedGame, JudgeQuestion, JudgeSettings
from animegamer_jax.evaluate.judge.scores import (
    CRITERIA,
    Verdict,
)
from animegamer_jax.storage.files import add_json
from animegamer_jax.storage.paths import absolute
from animegamer_jax.vlm.client import (
    Endpoint,
    NoAnswerError,
    connected,
)
from animegamer_jax.vlm.retry import (
    Requests,
    answer_file,
    ask_until_valid,
    kept_answer,
)
from animegamer_jax.vlm.usage import Usage

Progress = Callable[[int, int, Usage], None]


def judge(
    games: Sequence[JudgedGame],
    settings: JudgeSettings,
    *,
    cache: str | Path,
    seed: int = 0,
    on_progress: Progress = lambda done, total, usage: None,
    on_wait: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Lets a model score games.

    After `settings.patience` games in a row without a usable answer nobody is asked any more: the
    games left are set aside, but for those whose answers are in the cache. Asking again later
    pays only for games that were set aside. The scores do not depend on the number of questions
    at a time, nor on the order in which games and systems are given.

    Args:
        games: each with a name of its own.
        settings: which model is asked, and how.
        cache: folder of the answers, made where it is missing.
        seed: of the systems' order.
        on_progress: called with games done, games, and what was asked so far, its cost included.
        on_wait: called with a line about a slow or busy server, now and then.

    Returns:
        Scores, and why there are none of some games; perhaps of all.

    Raises:
        UserError: the settings name no model or a key that cannot be one, or the disk refuses.
        ValueError: two games have one name, or a game has no system or more than 26.
    """
    if settings.model is None:
        raise UserError("model: expected the name of a model at the endpoint, found none")
    if len({game.name for game in games}) != len(games):
        raise ValueError("expected a name of its own for each game")
    for game in games:
        if not 1 <= len(game.answers) <= len(_LABELS):
            raise ValueError(f"{game.name}: {len(game.answers)} systems, expected 1 to 26")
    run = _Run(settings, absolute(cache), seed=seed, on_progress=on_progress, on_wait=on_wait)
    try:
        asyncio.run(run.fill(games))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    names = tuple(game.name for game in games)
    systems = tuple(sorted({system for game in games for system in game.answers}))
    scores = np.full((len(names), len(systems), len(CRITERIA)), np.nan)
    for row, name in enumerate(names):
        for system, found in run.scores.get(name, {}).items():
            scores[row, systems.index(system)] = found
    return Verdict(
        model=settings.model,
        seed=seed,
        games=names,
        systems=systems,
        scores=scores,
        set_aside={name: run.set_aside[name] for name in names if name in run.set_aside},
        usage=run.usage,
    )


class _Run:
    """The answers about some games."""

    def __init__(
        self,
        settings: JudgeSettings,
        cache: epath.Path,
        *,
        seed: int,
        on_progress: Progress,
        on_wait: Callable[[str], None],
    ):
        self._settings, self._cache, self._seed = settings, cache, seed
        self._on_progress = on_progress
        self.usage = Usage()
        self._requests = Requests(settings, self.usage, on_wait=on_wait)
        self.scores: dict[str, dict[str, list[float]]] = {}
        self.set_aside: dict[str, str] = {}
        self._failures = 0
        self._gave_up: str | None = None

    async def fill(self, games: Sequence[JudgedGame]) -> None:
        """Gets scores of every game, from the disk or from the model, or a reason.

        Raises:
            BaseExceptionGroup: of what `judge` raises.
        """
        self._on_progress(0, len(games), self.usage)
        left = iter(games)
        async with (
            connected(self._settings, on_request=self._requests.sent) as endpoint,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._settings.parallel):
                group.create_task(self._work(endpoint, left, len(games)))

    async def _work(self, endpoint: Endpoint, games: Iterator[JudgedGame], total: int) -> None:
        """One worker: game after game, while there are some."""
        for game in games:
            try:
                self.scores[game.name] = await self._judge(endpoint, game)
            except _SetAsideError as error:
                self.set_aside[game.name] = str(error)
            self._on_progress(len(self.scores) + len(self.set_aside), total, self.usage)

    async def _judge(self, endpoint: Endpoint, game: JudgedGame) -> dict[str, list[float]]:
        """One game's scores.

        Raises:
            _SetAsideError: there are none.
            UserError: the disk refuses.
        """
        make = functools.partial(JudgeQuestion, game, settings=self._settings, seed=self._seed)
        try:
            question = await asyncio.to_thread(make)
        except UserError as error:
            raise _SetAsideError(str(error)) from None
        file = self._file(await asyncio.to_thread(lambda: question.digest))
        if (found := await asyncio.to_thread(_cached, file, question)) is not None:
            self.usage.cached += 1
            return found
        if self._gave_up is not None:
            raise _SetAsideError(self._gave_up)
        messages = await asyncio.to_thread(question.messages)
        try:
            asked = await ask_until_valid(
                endpoint,
                messages,
                schema=question.schema,
                name="scores",
                read=question.read,
                settings=self._settings,
                usage=self.usage,
            )
        except (NoAnswerError, UserError) as error:
            raise self._failed(str(error)) from None
        try:
            scores = question.read(asked.answer)
        except ValueError as error:
            raise self._failed(asked.why(error)) from None
        self._failures = 0
        await asyncio.to_thread(add_json, file, to_json(asked))
        return scores

    def _failed(self, reason: str) -> "_SetAsideError":
        """Counts games in a row without a usable answer."""
        self._failures += 1
        if self._failures >= self._settings.patience and self._gave_up is None:
            self._gave_up = (
                f"not asked, after {self._failures} games in a row without a usable answer, "
                f"the last: {reason}"
            )
        return _SetAsideError(reason)

    def _file(self, digest: str) -> epath.Path:
        return answer_file(self._cache, digest)


class _SetAsideError(Exception):
    """A game without scores, and the reason."""


def _cached(file: epath.Path, question: JudgeQuestion) -> dict[str, list[float]] | None:
    """The scores in an answer on disk; None: there is none, or it is damaged.

    Raises:
        UserError: the disk refuses.
    """
    try:
        asked = kept_answer(file)
        return None if asked is None else question.read(asked.answer)
    except ValueError:  # asked again
        return None
