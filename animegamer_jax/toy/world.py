"""Games of the toy world, and the rules for the states of their characters.

A game is a list of turns, each an instruction and the scene that answers it, with the paper's
states (section 3): motion level, social, entertainment, stamina. First turns say everything that
words can say but, in half of them, the manner. Later ones may be open: what they leave out stays as
in the turn before, which is the only way to know it. Only the level of a new motion or character
does not stay: without an adverb it follows the character (`untold_level`). Other things are never
put into words and can only be seen (`Details`, the looks of a player's own character).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from animegamer_jax.protocol import PAPER
from animegamer_jax.toy.scene import (
    ACCESSORIES,
    CHARACTERS,
    CLOTHES,
    DISTANCES,
    HAIR_COLOURS,
    HAIR_STYLES,
    LEVELS,
    MOTIONS,
    NAMES,
    PLACES,
    SIDES,
    STANDING,
    TIMES,
    VARIANTS,
    Details,
    OwnCharacter,
    Scene,
)
from animegamer_jax.toy.vocabulary import (
    Kind,
    write_caption,
    write_instruction,
    write_motion,
    write_picture_text,
)

Split = Literal["train", "test", "combinations", "phrasings", "own"]
SPLITS: tuple[Split, ...] = ("train", "test", "combinations", "phrasings", "own")
PROTOCOL = dataclasses.replace(
    PAPER,
    caption_length=32,
    stamina=(-2, -1, 1),
    motion_values=(0.6, 5.5, 15.0, 34.0, 42.0),
    guidance_scale=1.5,
    guidance_schedule="constant",
    denoising_steps=4,
    history="shown",
    picture_first=True,
    motion_guidance=1.5,
)
"""The paper's protocol in the toy world's sizes: short instructions, three values of stamina.

The history is what was shown, because untold details are in the pictures only. A picture comes
first, because the decoder chooses better what to draw than how it moves. The motion values are
larger than the flow that they stand for, because clips move less than they are asked to; level 5
stays too slow (docs/decisions/training-the-toy.md).
"""

_RULE_TURNS = PROTOCOL.window - 1
_OPEN_SHARE = 0.6
_OWN_SHARE = 0.4  # of the training games
TEMPERS = {
    "Mika": 4, "Ren": 3, "Hana": 2, "Kai": 4, "Yuki": 2, "Toma": 3, "Suzu": 4, "Nori": 2,
}  # fmt: skip
"""Motion level at which each character moves if nothing is said; own characters: 3."""
_OWN_TEMPER = 3


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
    if character not in CHARACTERS or motion not in MOTIONS:
        return False
    c, m, p = CHARACTERS.index(character), MOTIONS.index(motion), PLACES.index(place)
    return (c + p) % 3 == 0 and (m + c + 2 * p) % 4 == 0


def is_tired(history: Sequence[ToyTurn]) -> bool:
    """Returns whether the last two turns together cost a stamina of 2 or more."""
    return sum(turn.stamina for turn in history[-2:]) <= -2


def untold_level(history: Sequence[ToyTurn], character: str) -> int:
    """Returns the level of a motion whose manner is not said: the temper's, less one if tired."""
    return TEMPERS.get(character, _OWN_TEMPER) - is_tired(history)


def next_states(history: Sequence[ToyTurn], scene: Scene) -> tuple[int, int, int]:
    """Returns the states that a scene gives its character, by the last four turns before it.

    Stamina: rest gives 1; effort costs 1, or 2 when the last two turns together cost 2 or more.
    Social: talking gives 1, unless the last four turns had a talk with the same partner; waving
    gives 1, unless the turn before was a wave. Entertainment: running, jumping and flying from
    level 3 and talking from level 4 give 1, unless the turn before had the same motion; walking
    gives 1 in a place other than that of the turn before.

    Returns:
        Social (0, 1), entertainment (0, 1), stamina (-2, -1, 1).
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


_MOST_RESTFUL_LEVEL = {"sleep": 5, "sit": 5, STANDING: 5, "walk": 2, "wave": 3, "talk": 3}


def _stamina(history: Sequence[ToyTurn], scene: Scene) -> int:
    if scene.level <= _MOST_RESTFUL_LEVEL.get(scene.motion, 0):
        return 1
    return -2 if is_tired(history) else -1


def _repeats(history: Sequence[ToyTurn], scene: Scene) -> bool:
    return bool(history) and history[-1].scene.motion == scene.motion


def make_game(seed: int, *, num_turns: int = 5, split: Split = "train") -> tuple[ToyTurn, ...]:
    """Returns a game, which depends on the arguments alone.

    `test` is drawn like the training games without an own character, from other seeds. `own` begins
    with the picture of an own character whose looks no training game shows; four in ten training
    games begin with one of other looks. `combinations` shows only held-out triples of character,
    motion and place (`is_held_out`), which no other split shows. `phrasings` uses templates of
    sentences that no other split uses.
    """
    rng = np.random.default_rng((SPLITS.index(split), seed))
    own = None
    if split == "own" or (split == "train" and rng.random() < _OWN_SHARE):
        own = _draw_own(rng, held_out=split == "own")
    hidden = _Hidden.draw(rng, own)
    turns: list[ToyTurn] = []
    for number in range(num_turns):
        if own is not None and number == 0:
            kind, with_level, scene = "full", False, _picture_scene(rng, own)
        else:
            kind, with_level, scene = _draw_turn(rng, turns, split=split, own=own)
        scene = hidden.show(scene, rng)
        social, entertainment, stamina = next_states(turns, scene)
        text = (
            write_picture_text(scene, rng)
            if scene.motion == STANDING
            else write_instruction(scene, kind=kind, split=split, with_level=with_level, rng=rng)
        )
        turns.append(
            ToyTurn(
                instruction=text,
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


def _draw_own(rng: np.random.Generator, *, held_out: bool) -> OwnCharacter:
    while True:
        own = OwnCharacter(
            name=str(rng.choice(NAMES)),
            hair_colour=str(rng.choice(HAIR_COLOURS)),
            hair=str(rng.choice(HAIR_STYLES)),
            clothes=str(rng.choice(CLOTHES)),
        )
        if own.is_held_out == held_out:
            return own


def _picture_scene(rng: np.random.Generator, own: OwnCharacter) -> Scene:
    place, time = str(rng.choice(PLACES)), str(rng.choice(TIMES))
    return Scene(own.name, STANDING, place, time, 1, None, own=own)


class _Hidden:
    """What a game never puts into words: drawn once, and the view whenever the place changes."""

    def __init__(
        self, own: OwnCharacter | None, accessories: dict[str, str], variants: dict[str, int]
    ):
        self.own, self.accessories, self.variants = own, accessories, variants
        self._place, self._view = "", ("", "")

    @classmethod
    def draw(cls, rng: np.random.Generator, own: OwnCharacter | None) -> "_Hidden":
        names = (*CHARACTERS, *((own.name,) if own else ()))
        accessories = {name: str(rng.choice(ACCESSORIES)) for name in names}
        return cls(own, accessories, {place: int(rng.choice(VARIANTS)) for place in PLACES})

    def show(self, scene: Scene, rng: np.random.Generator) -> Scene:
        """Returns the scene with what nobody said."""
        if scene.place != self._place:
            self._place = scene.place
            self._view = str(rng.choice(SIDES)), str(rng.choice(DISTANCES))
        side, distance = self._view
        details = Details(
            accessory=self.accessories[scene.character],
            partner_accessory=self.accessories.get(scene.partner or "", ACCESSORIES[0]),
            variant=self.variants[scene.place],
            side=side,
            distance=distance,
        )
        own = self.own if self.own and self.own.name in (scene.character, scene.partner) else None
        seed = int(rng.integers(2**31))
        return dataclasses.replace(scene, details=details, own=own, seed=seed)


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
    rng: np.random.Generator,
    turns: Sequence[ToyTurn],
    *,
    split: Split,
    own: OwnCharacter | None,
) -> tuple[Kind, bool, Scene]:
    """Draws kind and scene of the next turn, again until the scene belongs to the split.

    Returns:
        The kind, whether a full instruction has an adverb, and the scene without its details.
    """
    is_open = bool(turns) and turns[-1].scene.motion != STANDING and rng.random() < _OPEN_SHARE
    while True:
        with_level = bool(rng.random() < 0.5)
        if is_open:
            kind: Kind = rng.choice(list(_OPEN_KINDS), p=list(_OPEN_KINDS.values()))
            scene = _open_scene(rng, turns, kind=kind, own=own)
        else:
            kind = "full"
            scene = _full_scene(rng, turns, own=own, with_level=with_level)
        if scene.character == scene.partner:
            continue
        held_out = is_held_out(scene.character, scene.motion, scene.place)
        if held_out == (split == "combinations"):
            return kind, with_level, scene


_KEEP_PROBABILITY = {"motion": 0.25, "place": 0.5, "time": 0.3}
_OPTIONS = {"motion": MOTIONS, "place": PLACES, "time": TIMES}
_KEEP_CHARACTER, _OWN_AGAIN = 0.5, 0.75


def _full_scene(
    rng: np.random.Generator,
    turns: Sequence[ToyTurn],
    *,
    own: OwnCharacter | None,
    with_level: bool,
) -> Scene:
    """Draws a scene; each part may repeat the turn before, so that the rules' exceptions occur."""
    drawn: dict[str, Any] = {"character": _draw_character(rng, turns, own=own)}
    for name, options in _OPTIONS.items():
        drawn[name] = str(rng.choice(options))
        repeats = (turns and turns[-1].scene.motion != STANDING) or name != "motion"
        if turns and repeats and rng.random() < _KEEP_PROBABILITY[name]:
            drawn[name] = getattr(turns[-1].scene, name)
    partner = None
    if drawn["motion"] == "talk":
        partner = _draw_partner(rng, turns, character=drawn["character"])
    level = int(rng.choice(LEVELS)) if with_level else untold_level(turns, drawn["character"])
    return Scene(**drawn, level=level, partner=partner, own=own)


def _draw_character(
    rng: np.random.Generator,
    turns: Sequence[ToyTurn],
    *,
    own: OwnCharacter | None,
    other_than: str = "",
) -> str:
    """Draws who acts: an own character mostly, else often one that the game has shown before."""
    if own is not None and own.name != other_than and rng.random() < _OWN_AGAIN:
        return own.name
    seen = [turn.scene.character for turn in turns if turn.scene.character != other_than]
    if seen and rng.random() < _KEEP_CHARACTER:
        return str(rng.choice(seen))
    return str(rng.choice([name for name in CHARACTERS if name != other_than]))


def _draw_partner(rng: np.random.Generator, turns: Sequence[ToyTurn], *, character: str) -> str:
    """Draws a partner; with probability 0.6 one of an earlier talk."""
    known = [turn.scene.partner for turn in turns if turn.scene.partner not in (None, character)]
    if known and rng.random() < 0.6:
        return str(rng.choice(known))
    return str(rng.choice([name for name in CHARACTERS if name != character]))


def _open_scene(
    rng: np.random.Generator,
    turns: Sequence[ToyTurn],
    *,
    kind: Kind,
    own: OwnCharacter | None,
) -> Scene:
    """Draws a scene that differs from the one before in what the kind names.

    If the instruction names another character or motion and no manner, the level is that of a
    manner that is not said.
    """
    before = turns[-1].scene
    named = kind.split()
    new: dict[str, str | int | None] = {}
    for name, options in (("place", PLACES), ("time", TIMES)):
        if name in named:
            new[name] = str(rng.choice([o for o in options if o != getattr(before, name)]))
    if "character" in named:
        new["character"] = _draw_character(rng, turns, own=own, other_than=before.character)
    character = str(new.get("character", before.character))
    if "motion" in named:
        motion = str(rng.choice(MOTIONS))
        partner = _draw_partner(rng, turns, character=character) if motion == "talk" else None
        new |= {"motion": motion, "partner": partner}
    if "level" in named:
        new["level"] = int(rng.choice(LEVELS))
    elif kind in ("faster", "slower"):
        step = 1 if kind == "faster" else -1
        new["level"] = min(max(before.level + step, LEVELS[0]), LEVELS[-1])
    elif "character" in named or "motion" in named:
        new["level"] = untold_level(turns, character)
    return dataclasses.replace(before, own=own, **new)
