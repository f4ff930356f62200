"""The toy world's benchmark: its held-out games in the benchmark's format, and back again."""

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import (
    PARTS,
    Benchmark,
    BenchmarkGame,
    BenchmarkTurn,
    Part,
    Parts,
    SceneTruth,
    StateValues,
)
from animegamer_jax.toy.scene import (
    CHARACTERS,
    LEVELS,
    Scene,
)
from animegamer_jax.toy.vocabulary import (
    ADVERBS,
    VERBS,
    split_words,
)
from animegamer_jax.toy.world import PROTOCOL, Split, ToyTurn, make_game

WORLD = "toy"


def make_toy_benchmark(
    *, num_games: int = 100, num_turns: int = 5, split: Split = "test", seed: int = 0
) -> Benchmark:
    """Makes a benchmark of games number `seed`, `seed + 1`, ... of a split.

    Raises:
        UserError: no games, no turns, or a seed below 0.
    """
    for name, value, low in (("games", num_games, 1), ("turns", num_turns, 1), ("seed", seed, 0)):
        if value < low:
            raise UserError(f"{name} {value}: expected {low} or more")
    drawn = {
        n: make_game(n, num_turns=num_turns, split=split) for n in range(seed, seed + num_games)
    }
    return Benchmark(
        name="toy" if split == "test" else f"toy-{split}",
        world=WORLD,
        made_by=f"the toy world's split {split}, games {seed} to {seed + num_games - 1}",
        num_turns=num_turns,
        states=StateValues(
            social=PROTOCOL.social,
            entertainment=PROTOCOL.entertainment,
            stamina=PROTOCOL.stamina,
        ),
        characters=CHARACTERS,
        games=tuple(
            BenchmarkGame(
                id=f"{split}-{number:03}",
                seed=number,
                characters=_who(turns),
                turns=tuple(_turn(turn) for turn in turns),
            )
            for number, turns in drawn.items()
        ),
    )


def _who(turns: tuple[ToyTurn, ...]) -> tuple[str, ...]:
    """Returns the characters that a game shows, in the world's order."""
    seen = {name for turn in turns for name in (turn.scene.character, turn.scene.partner)}
    return tuple(name for name in CHARACTERS if name in seen)


def _turn(turn: ToyTurn) -> BenchmarkTurn:
    scene = turn.scene
    said = split_words(turn.instruction)
    adverb = next((word for word in ADVERBS[scene.level] if word in said), None)
    named = {
        "character": scene.character.lower() in said,
        "adverb": adverb is not None,
        "motion": _names_motion(scene, said),
        "time": scene.time in said,
        "place": scene.place in said,
    }
    # A full instruction without an adverb means the middle level, so it omits nothing.
    omitted: tuple[Part, ...] = tuple(p for p in PARTS if turn.is_open and not named[p])
    return BenchmarkTurn(
        instruction=turn.instruction,
        parts=Parts(
            character=scene.character,
            adverb=adverb,
            motion=VERBS[scene.motion].gerund.format(partner=scene.partner),
            time=scene.time,
            place=scene.place,
        ),
        omitted=omitted,
        motion_level=scene.level,
        social=turn.social,
        entertainment=turn.entertainment,
        stamina=turn.stamina,
        caption=turn.caption,
        motion_text=turn.motion_text,
        scene=SceneTruth(motion=scene.motion, partner=scene.partner, seed=scene.seed),
    )


def _names_motion(scene: Scene, said: tuple[str, ...]) -> bool:
    verb = VERBS[scene.motion]
    return any(form.split()[0] in said for form in (verb.base, verb.gerund, verb.third))


def toy_games(benchmark: Benchmark) -> tuple[tuple[ToyTurn, ...], ...]:
    """Returns the games as the toy world's own turns, whose true clips can be drawn.

    Raises:
        UserError: the benchmark is of another world, or a turn is not a scene of this one.
    """
    if benchmark.world != WORLD:
        raise UserError(
            f"benchmark {benchmark.name}: expected games of the world {WORLD}, which can be drawn, "
            f"found {benchmark.world}"
        )
    return tuple(
        tuple(
            _toy_turn(turn, f"benchmark {benchmark.name}: game {game.id}: turn {number}")
            for number, turn in enumerate(game.turns, start=1)
        )
        for game in benchmark.games
    )


def _toy_turn(turn: BenchmarkTurn, where: str) -> ToyTurn:
    p, truth = turn.parts, turn.scene
    if truth is None or turn.caption is None or turn.motion_text is None:
        raise UserError(f"{where}: expected caption, motion_text and scene, found one missing")
    if p.character is None or p.place is None or p.time is None or turn.motion_level not in LEVELS:
        raise UserError(f"{where}: parts: expected character, place and time, found one missing")
    try:
        scene = Scene(
            character=p.character,
            motion=truth.motion,
            place=p.place,
            time=p.time,
            level=turn.motion_level,
            partner=truth.partner,
            seed=truth.seed,
        )
    except ValueError as error:
        raise UserError(f"{where}: scene: {error}") from None
    return ToyTurn(
        instruction=turn.instruction,
        is_open=turn.is_open,
        motion_text=turn.motion_text,
        caption=turn.caption,
        scene=scene,
        social=turn.social,
        entertainment=turn.entertainment,
        stamina=turn.stamina,
    )
