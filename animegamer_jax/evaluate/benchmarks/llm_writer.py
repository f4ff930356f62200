"""A benchmark written by a language model, as the paper's was (PAPER section 4.1).

For each game a model behind an OpenAI-compatible endpoint gets two characters, some motions and
some places, drawn from a user's lists, and answers with the turns part by part. The instructions
are composed here in the released form, so what they tell and what they omit is what the answer
says. Answers are validated; a wrong one is shown to the model again with what is wrong. Each is
kept on disk under a digest of all that it depends on, so the same question is not paid for twice.
A game without a valid answer is left out, counted and told.
"""

import asyncio
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator

from etils import epath

from animegamer_jax.bundle.config import to_json
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import (
    Benchmark,
    BenchmarkGame,
    StateValues,
)
from animegamer_jax.evaluate.benchmarks.prompt import (
    VERSION,
    GameQuestion,
    make_questions,
)
from animegamer_jax.evaluate.benchmarks.spec import Lists
from animegamer_jax.storage.files import add_json
from animegamer_jax.storage.paths import absolute
from animegamer_jax.vlm.client import (
    AskSettings,
    Endpoint,
    NoAnswerError,
    connected,
)
from animegamer_jax.vlm.retry import (
    Asked,
    Requests,
    answer_file,
    ask_until_valid,
    kept_answer,
)
from animegamer_jax.vlm.usage import Usage


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A game without a valid answer: its number and why."""

    number: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """What a model wrote.

    Attributes:
        benchmark: of the games with valid answers.
        left_out: the others.
        usage: requests, tokens and costs of this run, and how many answers were on disk.
    """

    benchmark: Benchmark
    left_out: tuple[LeftOut, ...]
    usage: Usage


def write_games(
    lists: Lists,
    settings: AskSettings,
    *,
    cache: epath.PathLike,
    num_games: int = 200,
    num_turns: int = 10,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_wait: Callable[[str], None] = lambda line: None,
) -> Written:
    """Asks a model for games; the result depends on the answers only, not on their order.

    Args:
        lists: what the games are made of.
        settings: which model, and how; `max_tokens` holds a whole game.
        cache: folder in which answers are kept.
        num_games: how many are asked for.
        num_turns: of each game.
        seed: number of the first game, which is also its seed in play.
        on_progress: called with games done and games.
        on_wait: called with a line about a slow or busy server, now and then.

    Raises:
        UserError: the settings name no model, the server cannot be used, too many games in a row
            have no usable answer, none has one, or the disk refuses. Answers that came before are
            kept.
    """
    if settings.model is None:
        raise UserError("model: expected the name of a model at the endpoint, found none")
    questions = make_questions(lists, num_games=num_games, num_turns=num_turns, seed=seed)
    run = _Run(settings, absolute(cache), len(questions), on_progress=on_progress, on_wait=on_wait)
    asyncio.run(run.fill(questions))
    games, left_out = [], []
    for question in questions:
        told = run.told[question.number]
        if isinstance(told, BenchmarkGame):
            games.append(told)
        else:
            left_out.append(LeftOut(number=question.number, reason=told))
    if not games:
        raise UserError(
            f"{settings.endpoint}: no game with a valid answer, the last: {left_out[-1].reason}: "
            "use another model, or more attempts"
        )
    benchmark = Benchmark(
        name=re.sub(r"\W+", "-", lists.world.casefold()).strip("-") or "games",
        world=lists.world,
        made_by=f"the model {settings.model}, {len(games)} of {num_games} games asked for"[:400],
        num_turns=num_turns,
        states=StateValues(),
        characters=lists.characters,
        games=tuple(games),
    )
    return Written(benchmark=benchmark, left_out=tuple(left_out), usage=run.usage)


class _Run:
    """Answers by the games' numbers: the game, or why there is none."""

    def __init__(
        self,
        settings: AskSettings,
        cache: epath.Path,
        total: int,
        *,
        on_progress: Callable[[int, int], None],
        on_wait: Callable[[str], None],
    ):
        self._settings, self._cache, self._total = settings, cache, total
        self._on_progress = on_progress
        self._failures = 0
        self.told: dict[int, BenchmarkGame | str] = {}
        self.usage = Usage()
        self._requests = Requests(settings, self.usage, on_wait=on_wait)

    async def fill(self, questions: tuple[GameQuestion, ...]) -> None:
        """Gets an answer for every game, from the disk or from the model."""
        for question in questions:
            if (asked := self._cached(question)) is not None:
                self.told[question.number] = self._read(question, asked)
                self.usage.cached += 1
        self._on_progress(len(self.told), self._total)
        missing = [question for question in questions if question.number not in self.told]
        if not missing:
            return
        rows = iter(missing)
        try:
            async with (
                connected(self._settings, on_request=self._requests.sent) as endpoint,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(self._settings.parallel):
                    group.create_task(self._work(endpoint, rows))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _work(self, endpoint: Endpoint, questions: Iterator[GameQuestion]) -> None:
        """One worker: game after game, while there are some."""
        for question in questions:
            try:
                asked = await ask_until_valid(
                    endpoint,
                    question.messages(),
                    schema=question.schema,
                    name="game",
                    read=question.read,
                    settings=self._settings,
                    usage=self.usage,
                )
            except NoAnswerError as error:
                told: BenchmarkGame | str = str(error)
            else:
                add_json(self._file(question), to_json(asked))
                told = self._read(question, asked)
            self.told[question.number] = told
            self._on_progress(len(self.told), self._total)
            self._count(told)

    def _read(self, question: GameQuestion, asked: Asked) -> BenchmarkGame | str:
        try:
            return question.read(asked.answer)
        except ValueError as error:
            return asked.why(error)

    def _count(self, told: BenchmarkGame | str) -> None:
        """Counts games in a row without a usable answer."""
        if isinstance(told, BenchmarkGame):
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= self._settings.patience:
            raise UserError(
                f"{self._settings.endpoint}: no usable answer for {self._failures} games in a row, "
                f"the last: {told}: check the server and the model, then run the same command "
                "again: finished answers are kept"
            )

    def _file(self, question: GameQuestion) -> epath.Path:
        s = self._settings
        about = [VERSION, question.messages(), question.schema, question.number]
        about += [s.model, s.temperature]
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        return answer_file(self._cache, key)

    def _cached(self, question: GameQuestion) -> Asked | None:
        """An answer on disk; None: there is none, or one that further attempts may better."""
        asked = kept_answer(self._file(question))
        if asked is None:
            return None
        if isinstance(self._read(question, asked), BenchmarkGame):
            return asked
        return None if asked.may_be_bettered(self._settings) else asked
