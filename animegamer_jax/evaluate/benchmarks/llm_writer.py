"""A benchmark written by a language model, as the paper's was (paper, section 4.1).

For each game the model gets two characters, some motions and some places, drawn from a user's
lists, and answers with the turns, part by part. The instructions are composed here in the released
form, so they say and omit exactly what the answer says. Replies are cached on disk. A game without
a valid answer is skipped and listed.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping

from etils import epath

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark, BenchmarkGame, StateValues
from animegamer_jax.evaluate.benchmarks.prompt import VERSION, GamePrompt, make_prompts
from animegamer_jax.evaluate.benchmarks.spec import Lists
from animegamer_jax.storage.paths import absolute
from animegamer_jax.vlm.ask_many import AskMany
from animegamer_jax.vlm.client import AskSettings
from animegamer_jax.vlm.retry import Prompt
from animegamer_jax.vlm.usage import Usage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """The games with valid answers, why others were skipped, by number, and this run's usage."""

    benchmark: Benchmark
    skipped: Mapping[int, str]
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
    """Asks a model for games; the result depends on its answers, not on their order.

    Args:
        lists: Characters, motions and places of the games.
        settings: Which model is asked, and how; `max_tokens` must suffice for a whole game.
        cache: Folder of the replies.
        num_games: Number of games to ask for.
        num_turns: Number of turns of each game.
        seed: Number of the first game, which is also its seed in play.
        on_progress: Called with the numbers of finished and of all games.
        on_wait: Called with a line about a slow or busy server, once a minute at most.

    Raises:
        UserError: The settings name no model, the model cannot be asked, too many games in a row
            or all have no usable answer, or the cache cannot be read or written. Answers received
            so far are cached.
    """
    ask = AskMany(settings, noun="games", on_wait=on_wait)
    prompts = make_prompts(lists, num_games=num_games, num_turns=num_turns, seed=seed)
    makers = [functools.partial(_prompt, prompt, settings) for prompt in prompts]
    answers = ask(makers, cache=absolute(cache), on_progress=on_progress)
    games = tuple(answer.value for answer in answers if answer.value is not None)
    asked = zip(prompts, answers, strict=True)
    skipped = {p.number: answer.reason for p, answer in asked if answer.reason is not None}
    if not games:
        raise UserError(
            f"{settings.endpoint}: no game with a valid answer, the last: {answers[-1].reason}: "
            "use another model, or more attempts"
        )
    benchmark = Benchmark(
        name=re.sub(r"\W+", "-", lists.world.casefold()).strip("-") or "games",
        world=lists.world,
        made_by=f"the model {settings.model}, {len(games)} of {num_games} games asked for"[:400],
        num_turns=num_turns,
        states=StateValues(),
        characters=lists.characters,
        games=games,
    )
    return Written(benchmark=benchmark, skipped=skipped, usage=ask.usage)


def _prompt(game: GamePrompt, settings: AskSettings) -> Prompt[BenchmarkGame]:
    content = [VERSION, game.messages(), game.schema, game.number]
    content += [settings.model, settings.temperature]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return Prompt(key=key, messages=game.messages, schema=game.schema, parse=game.parse)
