"""Scores of played games, 0 to 10, by a vision-language model (paper, section 4.2).

One question per game shows all systems' answers under neutral labels, in an order drawn for the
game. Replies are cached on disk. A game without a valid answer is skipped with the reason. The
wording is our own: the paper's is not published.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from animegamer_jax.evaluate.judge.prompt import LABELS, JudgedGame, JudgePrompt, JudgeSettings
from animegamer_jax.evaluate.judge.scores import CRITERIA, JudgeScores
from animegamer_jax.storage.paths import absolute
from animegamer_jax.vlm.ask_many import AskMany
from animegamer_jax.vlm.retry import Prompt


def judge(
    games: Sequence[JudgedGame],
    settings: JudgeSettings,
    *,
    cache: str | Path,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_wait: Callable[[str], None] = lambda line: None,
) -> JudgeScores:
    """Asks a model to score games.

    After `settings.patience` games in a row without a usable answer, only games whose answers are
    cached are scored. A later call asks about the skipped games only. The scores do not depend on
    the number of simultaneous requests, nor on the order of games and systems.

    Args:
        games: The games, of different names.
        settings: Which model is asked, and how.
        cache: Folder of the replies; made if it is missing.
        seed: Seed of the systems' order.
        on_progress: Called with the numbers of finished and of all games.
        on_wait: Called with a line about a slow or busy server, once a minute at most.

    Returns:
        The scores, and why games were skipped, which may be all of them.

    Raises:
        UserError: The settings name no model or an impossible key, or the cache cannot be read or
            written.
        ValueError: Two games have one name, or a game has no system or more than 26.
    """
    ask = AskMany(settings, noun="games", best_effort=True, on_wait=on_wait)
    if len({game.name for game in games}) != len(games):
        raise ValueError("expected a name of its own for each game")
    for game in games:
        if not 1 <= len(game.answers) <= len(LABELS):
            raise ValueError(f"{game.name}: {len(game.answers)} systems, expected 1 to 26")
    answers = ask(
        [functools.partial(_prompt, game, settings=settings, seed=seed) for game in games],
        cache=absolute(cache),
        on_progress=on_progress,
    )
    names = tuple(game.name for game in games)
    systems = tuple(sorted({system for game in games for system in game.answers}))
    scores = np.full((len(names), len(systems), len(CRITERIA)), np.nan)
    for row, answer in enumerate(answers):
        for system, found in (answer.value or {}).items():
            scores[row, systems.index(system)] = found
    return JudgeScores(
        model=str(settings.model),
        seed=seed,
        games=names,
        systems=systems,
        scores=scores,
        skipped={n: a.reason for n, a in zip(names, answers, strict=True) if a.reason is not None},
        usage=ask.usage,
    )


def _prompt(
    game: JudgedGame, *, settings: JudgeSettings, seed: int
) -> Prompt[dict[str, list[float]]]:
    made = JudgePrompt(game, settings=settings, seed=seed)
    return Prompt(key=made.key, messages=made.messages, schema=made.schema, parse=made.parse)
