"""The toy world's benchmark: its held-out games in the benchmark's format, and back again."""

import dataclasses

from animegamer_jax.errors import UserError, check_at_least
from animegamer_jax.evaluate.benchmarks.format import (
    PARTS,
    Benchmark,
    BenchmarkGame,
    BenchmarkTurn,
    Detail,
    Part,
    Parts,
    SceneTruth,
    StateValues,
)
from animegamer_jax.toy.scene import CHARACTERS, LEVELS, Details, OwnCharacter, Scene
from animegamer_jax.toy.vocabulary import ADVERBS, VERBS, split_words
from animegamer_jax.toy.world import PROTOCOL, Split, ToyTurn, make_game

WORLD = "toy"


def make_toy_benchmark(
    *, num_games: int = 100, num_turns: int = 5, split: Split = "test", seed: int = 0
) -> Benchmark:
    """Makes a benchmark of games number `seed`, `seed + 1`, ... of a split.

    Games of the split `own` have a picture before their first turn.

    Raises:
        UserError: No games, no turns, or a seed below 0.
    """
    for name, value, low in (("games", num_games, 1), ("turns", num_turns, 1), ("seed", seed, 0)):
        check_at_least(name, value, low)
    pictures = int(split == "own")
    drawn = {
        number: make_game(number, num_turns=pictures + num_turns, split=split)
        for number in range(seed, seed + num_games)
    }
    names = {turn.scene.own.name for turns in drawn.values() for turn in turns if turn.scene.own}
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
        characters=(*CHARACTERS, *sorted(names)),
        games=tuple(
            BenchmarkGame(
                id=f"{split}-{number:03}",
                seed=number,
                characters=_who(turns),
                picture=_turn(turns[0]) if pictures else None,
                turns=tuple(_turn(turn) for turn in turns[pictures:]),
            )
            for number, turns in drawn.items()
        ),
    )


def _who(turns: tuple[ToyTurn, ...]) -> tuple[str, ...]:
    """Returns the characters that a game shows, in alphabetical order."""
    seen = {name for turn in turns for name in (turn.scene.character, turn.scene.partner)}
    return tuple(sorted(name for name in seen if name))


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
    # A full instruction without an adverb leaves the manner to the character, so it omits nothing.
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
        scene=SceneTruth(
            motion=scene.motion,
            partner=scene.partner,
            details=tuple(Detail(name=k, value=v) for k, v in _details(scene).items()),
            seed=scene.seed,
        ),
    )


def _details(scene: Scene) -> dict[str, str]:
    found = {name: str(value) for name, value in dataclasses.asdict(scene.details).items()}
    if scene.own is not None:
        found |= {f"own {name}": value for name, value in dataclasses.asdict(scene.own).items()}
    return found


def _scene_of(turn: BenchmarkTurn, truth: SceneTruth) -> Scene:
    """Returns the scene of a turn.

    Raises:
        ValueError: It is not one of this world.
    """
    found = {detail.name: detail.value for detail in truth.details}
    own = {name.removeprefix("own "): found.pop(name) for name in [*found] if name[:4] == "own "}
    for kind, given in ((Details, found), (OwnCharacter, own)):
        names = {field.name for field in dataclasses.fields(kind)}
        if given and given.keys() != names:
            raise ValueError(f"details: expected {', '.join(sorted(names))} of {kind.__name__}")
    if len(found) + len(own) < len(truth.details):
        raise ValueError("details: expected each name once")
    details = Details()
    if found:
        details = Details(variant=int(found.pop("variant")), **found)
    parts = turn.parts
    return Scene(
        character=parts.character or "",
        motion=truth.motion,
        place=parts.place or "",
        time=parts.time or "",
        level=turn.motion_level,
        partner=truth.partner,
        details=details,
        own=OwnCharacter(**own) if own else None,
        seed=truth.seed,
    )


def _names_motion(scene: Scene, said: tuple[str, ...]) -> bool:
    verb = VERBS[scene.motion]
    return any(form.split()[0] in said for form in (verb.base, verb.gerund, verb.third))


def toy_games(benchmark: Benchmark) -> tuple[tuple[ToyTurn, ...], ...]:
    """Returns the games as the toy world's own turns, whose true clips can be drawn; no pictures.

    Raises:
        UserError: The benchmark is of another world, or a turn is not a scene of this one.
    """
    _check_world(benchmark)
    return tuple(
        tuple(
            _toy_turn(turn, f"benchmark {benchmark.name}: game {game.id}: turn {number}")
            for number, turn in enumerate(game.turns, start=1)
        )
        for game in benchmark.games
    )


def toy_pictures(benchmark: Benchmark) -> tuple[ToyTurn | None, ...]:
    """Returns the turn of each game's picture; None: it has none.

    Raises:
        UserError: As `toy_games`.
    """
    _check_world(benchmark)
    return tuple(
        game.picture
        and _toy_turn(game.picture, f"benchmark {benchmark.name}: game {game.id}: picture")
        for game in benchmark.games
    )


def _check_world(benchmark: Benchmark) -> None:
    if benchmark.world != WORLD:
        raise UserError(
            f"benchmark {benchmark.name}: expected games of the world {WORLD}, which can be drawn, "
            f"found {benchmark.world}"
        )


def _toy_turn(turn: BenchmarkTurn, where: str) -> ToyTurn:
    p, truth = turn.parts, turn.scene
    if truth is None or turn.caption is None or turn.motion_text is None:
        raise UserError(f"{where}: expected caption, motion_text and scene, found one missing")
    if p.character is None or p.place is None or p.time is None or turn.motion_level not in LEVELS:
        raise UserError(f"{where}: parts: expected character, place and time, found one missing")
    try:
        scene = _scene_of(turn, truth)
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
