"""Games of the toy world, and the rules for the states of their characters.

A game is a list of turns, each an instruction and the scene that answers it, with the paper's
states (section 3): motion level, social, entertainment, stamina. First turns say everything. Later
ones may be open: what they leave out stays as in the turn before, which is the only way to know it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from animegamer_jax.protocol import PAPER
from animegamer_jax.toy.scene import (
    CHARACTERS,
    LEVELS,
    MOTION_VALUES,
    MOTIONS,
    PLACES,
    TIMES,
    Scene,
)
from animegamer_jax.toy.vocabulary import Kind, write_caption, write_instruction, write_motion

Split = Literal["train", "test", "combinations", "phrasings"]
SPLITS: tuple[Split, ...] = ("train", "test", "combinations", "phrasings")
PROTOCOL = dataclasses.replace(
    PAPER,
    caption_length=32,
    stamina=(-2, -1, 1),
    motion_values=MOTION_VALUES,
    guidance_scale=0.0,
    denoising_steps=4,
)
"""The paper's protocol in the toy world's sizes: short instructions, three values of stamina.

There is no guidance, because little is left to chance and it would only exaggerate contrasts. There
are few denoising steps, because many of them slow fast motion down (`scripts/toy/steps.py`).
"""

_RULE_TURNS = PROTOCOL.window - 1
_OPEN_SHARE = 0.6


@dataclasses.dataclass(frozen=True)
class ToyTurn:
    """One turn of a game.

    Attributes:
        instruction: Text that the player types.
        is_open: Whether the instruction leaves out something that the turns before determine.
        motion_text: Complete motion text, for T5.
        caption: Complete caption, for CLIP.
        scene: Content of the clip.
        social, entertainment: States of 0 or 1.
        stamina: State of -2, -1 or 1.
    """

    instruction: str
    is_open: bool
    motion_text: str
    caption: str
    scene: Scene
    social: int
    entertainment: int
    stamina: int


def is_held_out(character: str, motion: str, place: str) -> bool:
    """Returns whether only `combinations` shows this triple: one in twelve, and no whole pair."""
    c, m, p = CHARACTERS.index(character), MOTIONS.index(motion), PLACES.index(place)
    return (c + p) % 3 == 0 and (m + c + 2 * p) % 4 == 0


def next_states(history: Sequence[ToyTurn], scene: Scene) -> tuple[int, int, int]:
    """Returns the states that a scene gives its character, by the last four turns before it.

    Stamina: rest gives 1; effort costs 1, or 2 when the last two turns together cost 2 or more.
    Social: talking gives 1, unless the last four turns had a talk with the same partner; waving
    gives 1, unless the turn before was a wave. Entertainment: running, jumping and flying from
    level 3 and talking from level 4 give 1, unless the turn before had the same motion; walking
    gives 1 in a place other than that of the turn before.

    Returns:
        social (0, 1), entertainment (0, 1), stamina (-2, -1, 1).
    """
    history = history[-_RULE_TURNS:]
    return _social(history, scene), _entertainment(history, scene), _stamina(history, scene)


def _social(history: Sequence[ToyTurn], scene: Scene) -> int:
    if scene.motion == "talk":
        return int(all(turn.scene.partner != scene.partner for turn in history))
    return int(scene.motion == "wave" and not _repeats(history, scene))


_LEAST_THRILLING_LEVEL = {"run": 3, "jump": 3, "fly": 3, "talk": 4}


def _entertainment(history: Sequence[ToyTurn], scene: Scene) -> int:
    if scene.motion == "walk":
        return int(not history or history[-1].scene.place != scene.place)
    thrilling = (
        scene.motion in _LEAST_THRILLING_LEVEL
        and scene.level >= _LEAST_THRILLING_LEVEL[scene.motion]
    )
    return int(thrilling and not _repeats(history, scene))


_MOST_RESTFUL_LEVEL = {"sleep": 5, "sit": 5, "walk": 2, "wave": 3, "talk": 3}


def _stamina(history: Sequence[ToyTurn], scene: Scene) -> int:
    if scene.level <= _MOST_RESTFUL_LEVEL.get(scene.motion, 0):
        return 1
    tired = sum(turn.stamina for turn in history[-2:]) <= -2
    return -2 if tired else -1


def _repeats(history: Sequence[ToyTurn], scene: Scene) -> bool:
    return bool(history) and history[-1].scene.motion == scene.motion


def make_game(seed: int, *, num_turns: int = 5, split: Split = "train") -> tuple[ToyTurn, ...]:
    """Returns a game, which depends on the arguments alone.

    `test` is drawn like `train`, from other seeds. `combinations` shows only held-out triples of
    character, motion and place (`is_held_out`), which no other split shows. `phrasings` uses
    templates of sentences that no other split uses. Scenes have no seed: what no instruction
    mentions is the same in all games, because the language model could not predict it.
    """
    rng = np.random.default_rng((SPLITS.index(split), seed))
    turns: list[ToyTurn] = []
    for _ in range(num_turns):
        kind, scene = _draw_turn(rng, turns, split=split)
        social, entertainment, stamina = next_states(turns, scene)
        turns.append(
            ToyTurn(
                instruction=write_instruction(scene, kind=kind, split=split, rng=rng),
                is_open=kind != "full",
                motion_text=write_motion(scene, rng),
                caption=write_caption(scene, rng),
                scene=scene,
                social=social,
                entertainment=entertainment,
                stamina=stamina,
            )
        )
    return tuple(turns)


_OPEN_KINDS: dict[Kind, float] = {
    "again": 0.09,
    "faster": 0.11,
    "slower": 0.11,
    "level": 0.08,
    "motion": 0.10,
    "motion level": 0.11,
    "place": 0.09,
    "time": 0.09,
    "place time": 0.05,
    "character": 0.09,
    "character motion": 0.04,
    "motion level place": 0.04,
}


def _draw_turn(
    rng: np.random.Generator, turns: Sequence[ToyTurn], *, split: Split
) -> tuple[Kind, Scene]:
    """Draws kind and scene of the next turn, again until the scene belongs to the split."""
    is_open = bool(turns) and rng.random() < _OPEN_SHARE
    while True:
        if is_open:
            kind: Kind = rng.choice(list(_OPEN_KINDS), p=list(_OPEN_KINDS.values()))
            scene = _open_scene(rng, turns, kind=kind)
        else:
            kind, scene = "full", _full_scene(rng, turns)
        if scene.character == scene.partner:
            continue
        if is_held_out(scene.character, scene.motion, scene.place) == (split == "combinations"):
            return kind, scene


_KEEP_PROBABILITY = {"character": 0.5, "motion": 0.25, "place": 0.4, "time": 0.3}
_OPTIONS = {"character": CHARACTERS, "motion": MOTIONS, "place": PLACES, "time": TIMES}


def _full_scene(rng: np.random.Generator, turns: Sequence[ToyTurn]) -> Scene:
    """Draws a scene; each part may repeat the turn before, so that the rules' exceptions occur."""
    drawn: dict[str, str] = {}
    for name, options in _OPTIONS.items():
        drawn[name] = str(rng.choice(options))
        if turns and rng.random() < _KEEP_PROBABILITY[name]:
            drawn[name] = getattr(turns[-1].scene, name)
    partner = None
    if drawn["motion"] == "talk":
        partner = _draw_partner(rng, turns, character=drawn["character"])
    return Scene(**drawn, level=int(rng.choice(LEVELS)), partner=partner, seed=None)


def _draw_partner(rng: np.random.Generator, turns: Sequence[ToyTurn], *, character: str) -> str:
    """Draws a partner; with probability 0.6 one of an earlier talk."""
    known = [turn.scene.partner for turn in turns if turn.scene.partner not in (None, character)]
    if known and rng.random() < 0.6:
        return str(rng.choice(known))
    return str(rng.choice([name for name in CHARACTERS if name != character]))


def _open_scene(rng: np.random.Generator, turns: Sequence[ToyTurn], *, kind: Kind) -> Scene:
    """Draws a scene that differs from the one before in what the kind names."""
    before = turns[-1].scene
    named = kind.split()
    new: dict[str, str | int | None] = {}
    for name, options in (("character", CHARACTERS), ("place", PLACES), ("time", TIMES)):
        if name in named:
            new[name] = str(rng.choice([o for o in options if o != getattr(before, name)]))
    if "motion" in named:
        motion = str(rng.choice(MOTIONS))
        character = str(new.get("character", before.character))
        partner = _draw_partner(rng, turns, character=character) if motion == "talk" else None
        new |= {"motion": motion, "partner": partner}
    if "level" in named:
        new["level"] = int(rng.choice(LEVELS))
    if kind in ("faster", "slower"):
        step = 1 if kind == "faster" else -1
        new["level"] = min(max(before.level + step, LEVELS[0]), LEVELS[-1])
    return dataclasses.replace(before, **new)
