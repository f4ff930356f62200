"""The language of the toy world: instructions, motion texts and captions in a closed vocabulary.

An instruction fills a template of some kind; the kind names what the sentence says of the scene.
`FULL` templates say everything, half of the time without the manner. `OPEN` templates leave the
rest to the turns before. The split `phrasings` has templates of its own, made of words that
training sees.
"""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Literal

import numpy as np

from animegamer_jax.bundle.vocabulary import TOKENIZER_FOLDER, WORDS_FILE, Vocabulary
from animegamer_jax.storage.serialization import to_json
from animegamer_jax.tokenizer import write_word_tokenizer
from animegamer_jax.toy.scene import (
    ACCESSORIES,
    CHARACTERS,
    CLOTHES,
    DISTANCES,
    HAIR_COLOURS,
    HAIR_STYLES,
    NAMES,
    PLACES,
    SIDES,
    STANDING,
    TIMES,
    Details,
    OwnCharacter,
    Scene,
)

Kind = Literal[
    "full", "again", "faster", "slower", "level", "motion", "motion level", "place", "time",
    "place time", "character", "character motion", "motion level place",
]  # fmt: skip

ADVERBS: dict[int, tuple[str, ...]] = {
    1: ("barely", "hardly", "faintly"),
    2: ("gently", "slowly", "softly"),
    3: ("steadily", "evenly", "normally"),
    4: ("quickly", "swiftly", "briskly"),
    5: ("wildly", "furiously", "madly"),
}


@dataclasses.dataclass(frozen=True)
class Verb:
    """A motion's three verb forms; `{partner}` stands for the listener."""

    base: str
    gerund: str
    third: str


VERBS: dict[str, Verb] = {
    "walk": Verb("walk", "walking", "walks"),
    "run": Verb("run", "running", "runs"),
    "jump": Verb("jump", "jumping", "jumps"),
    "fly": Verb("fly on a broom", "flying on a broom", "flies on a broom"),
    "sit": Verb("sit", "sitting", "sits"),
    "wave": Verb("wave", "waving", "waves"),
    "sleep": Verb("sleep", "sleeping", "sleeps"),
    "talk": Verb("talk to {partner}", "talking to {partner}", "talks to {partner}"),
    STANDING: Verb("stand", "standing", "stands"),
}
# Changes that a motion brings whatever its level, unless it repeats the turn before.
_EFFECTS: dict[str, dict[str, int]] = {
    "run": {"stamina": -1, "entertainment": 1},
    "jump": {"stamina": -1, "entertainment": 1},
    "fly": {"stamina": -1, "entertainment": 1},
    "sit": {"stamina": 1},
    "sleep": {"stamina": 1},
    "wave": {"social": 1},
    "talk": {"social": 1},
}
WHERE = {place: f"{'on' if place == 'beach' else 'in'} the {place}" for place in PLACES}
WHEN = {"day": ("by day", "in the day"), "night": ("by night", "at night")}
# Words for untold details: only the captions that CLIP learns from have them.
LOOKS_OF_VARIANTS: dict[str, tuple[str, str, str]] = {
    "meadow": ("in summer", "in spring", "in autumn"),
    "beach": ("with blue water", "with turquoise water", "with purple water"),
    "town": ("with red roofs", "with blue roofs", "with green roofs"),
    "forest": ("in summer", "in autumn", "in winter"),
    "bedroom": ("with pink walls", "with blue walls", "with green walls"),
    "snow": ("with black hats", "with red hats", "with yellow hats"),
}
LOOKS_OF_VIEWS = {side: {d: f"{d} from the {side}" for d in DISTANCES} for side in SIDES}

_RELEASED_TEMPLATE = (
    "Character: {character}; Motion: {adverb} {gerund}; Background: {time} {place}."
)
FULL: tuple[str, ...] = (
    "{character} {third} {adverb} {where} {when}.",
    "{When}, {character} is {adverb} {gerund} {where}.",
    "{character} is {adverb} {gerund} {where} {when}.",
    "Show {character} {adverb} {gerund} {where} {when}.",
    "It is {time} {where} and {character} {third} {adverb}.",
)
FULL_PHRASINGS: tuple[str, ...] = (
    "Background: {time} {place}; Character: {character}; Motion: {adverb} {gerund}.",
    "{Where} {when}, {character} {third} {adverb}.",
    "Now show {character} {where}, {when}, {adverb} {gerund}.",
    "{character}: {adverb} {gerund} {where} {when}.",
)
OPEN: dict[Kind, tuple[str, ...]] = {
    "again": ("Go on.", "Go on {gerund}.", "The same again.", "Again."),
    "faster": ("Faster.", "Go on {gerund}, faster.", "The same, but faster."),
    "slower": ("Slower.", "Go on {gerund}, slower.", "The same, but slower."),
    "level": ("Motion: {adverb}.", "Now {adverb}.", "Go on {gerund}, but {adverb}."),
    "motion": ("Motion: {base}.", "Now {base}.", "Then {base}.", "Motion: {gerund}."),
    "motion level": (
        "Motion: {adverb} {base}.",
        "Motion: {adverb} {gerund}.",
        "Now {adverb} {base}.",
        "Then {base} {adverb}.",
    ),
    "place": ("Background: {place}.", "Now {where}.", "The same {where}.", "Go on {where}."),
    "time": ("Background: {time}.", "The same {when}.", "Now it is {time}.", "Go on {when}."),
    "place time": (
        "Background: {time} {place}.",
        "The same {where} {when}.",
        "Now {where} {when}.",
    ),
    "character": ("Character: {character}.", "{character} does it.", "The same with {character}."),
    "character motion": (
        "Character: {character}; Motion: {base}.",
        "Now {character} {third}.",
        "Then {character} is {gerund}.",
    ),
    "motion level place": (
        "Motion: {adverb} {gerund}; Background: {place}.",
        "Now {adverb} {base} {where}.",
        "Then {base} {adverb} {where}.",
    ),
}
OPEN_PHRASINGS: dict[Kind, tuple[str, ...]] = {
    "again": ("Now the same.", "Then go on {gerund}."),
    "faster": ("Now go on faster.", "Faster {gerund}."),
    "slower": ("Now go on slower.", "Slower {gerund}."),
    "level": ("Go on {adverb}.", "The same, {adverb}."),
    "motion": ("Show {gerund}.", "Now it is {gerund}."),
    "motion level": ("Show {gerund}, {adverb}.", "{Adverb} {base}."),
    "place": ("Show it {where}.", "Go on, now {where}."),
    "time": ("Show it {when}.", "Then it is {time}."),
    "place time": ("It is {time} {where}.", "Go on {where} {when}."),
    "character": ("Now show {character}.", "Go on with {character}."),
    "character motion": ("Show {character} {gerund}.", "{character}: {base}."),
    "motion level place": ("Go on {where}, {gerund} {adverb}.", "{Where}, {adverb} {base}."),
}
_CAPTIONS: tuple[str, ...] = (
    "{character} is {adverb} {gerund} {where} {when}",
    "{character} {adverb} {gerund} {where} {when}",
    "{When}, {character} {third} {adverb} {where}",
)
_RELEASED_SHARE = 0.5


def write_instruction(
    scene: Scene, *, kind: Kind, split: str, with_level: bool, rng: np.random.Generator
) -> str:
    """Returns a sentence with what its kind says of the scene.

    Args:
        scene: Scene to ask for.
        kind: What the sentence says.
        split: Split of the game; `phrasings` has templates of its own.
        with_level: Whether a full instruction has an adverb; those of other kinds follow the kind.
        rng: Source of the choices.
    """
    if split == "phrasings":
        templates = FULL_PHRASINGS if kind == "full" else OPEN_PHRASINGS[kind]
    elif kind == "full":
        templates = (_RELEASED_TEMPLATE,) if rng.random() < _RELEASED_SHARE else FULL
    else:
        templates = OPEN[kind]
    plain = kind == "full" and not with_level
    adverb = "" if plain else str(rng.choice(ADVERBS[scene.level]))
    return _fill(str(rng.choice(templates)), scene, adverb=adverb, rng=rng)


def write_picture_text(scene: Scene, rng: np.random.Generator) -> str:
    """Returns the text of a picture, in the form that `animegamer play --picture-text` asks for."""
    return _fill(_RELEASED_TEMPLATE, scene, adverb="", rng=rng)


def write_motion(scene: Scene, rng: np.random.Generator) -> str:
    """Returns the motion text, the input of T5, without the manner: "flying on a broom"."""
    return _fill("{gerund}", scene, adverb="", rng=rng)


def write_caption(scene: Scene, rng: np.random.Generator) -> str:
    """Returns a caption with all that an instruction can say, in one of a few wordings."""
    adverb = str(rng.choice(ADVERBS[scene.level]))
    return _fill(str(rng.choice(_CAPTIONS)), scene, adverb=adverb, rng=rng)


def write_detailed_captions(scene: Scene, rng: np.random.Generator) -> tuple[str, ...]:
    """Returns captions of single things and of several, untold details among them; CLIP's texts.

    Those of single things teach CLIP each of them ("the beach", "night"). An own character's name
    is in none of them, because it says nothing about a picture.
    """
    actor, details = _look(scene, scene.character), scene.details
    variant, view = look_of_variant(scene.place, details.variant), look_of_view(details)
    where = f"the {scene.place} {variant}"
    single = [
        actor,
        f"the {scene.place}",
        scene.time,
        details.accessory,
        where,
        view,
        f"{actor} with a {details.accessory}",
        f"{view}, a {details.accessory}",
        f"{actor} with a {details.accessory}, {view}, {scene.time}, {where}",
    ]
    if own := scene.own_looks(scene.character):
        single += [f"{own.hair_colour} {own.hair} hair", f"a {own.clothes}"]
    if scene.partner is not None:
        partner = _look(scene, scene.partner)
        single.append(f"{actor} and {partner} with a {details.partner_accessory}")
    elif scene.motion != STANDING:
        single.append(_fill("{adverb} {gerund}", scene, adverb=_adverb(scene, rng), rng=rng))
    return tuple(single)


def look_of_variant(place: str, variant: int) -> str:
    """Returns the words for a variant of a place: "with red roofs"."""
    return LOOKS_OF_VARIANTS[place][variant]


def look_of_view(details: Details) -> str:
    """Returns the words for a view: "far from the left"."""
    return LOOKS_OF_VIEWS[details.side][details.distance]


def look_of_own(own: OwnCharacter) -> str:
    """Returns the looks of a player's own character in words."""
    return f"{own.hair_colour} {own.hair} hair, a {own.clothes}"


def _look(scene: Scene, name: str) -> str:
    own = scene.own_looks(name)
    return look_of_own(own) if own else name


def _adverb(scene: Scene, rng: np.random.Generator) -> str:
    return str(rng.choice(ADVERBS[scene.level]))


def _fill(template: str, scene: Scene, *, adverb: str, rng: np.random.Generator) -> str:
    verb = dataclasses.asdict(VERBS[scene.motion])
    when = str(rng.choice(WHEN[scene.time]))
    text = template.format(
        **{form: value.format(partner=scene.partner) for form, value in verb.items()},
        character=scene.character,
        adverb=adverb,
        Adverb=adverb.capitalize(),
        place=scene.place,
        where=WHERE[scene.place],
        Where=WHERE[scene.place].capitalize(),
        time=scene.time,
        when=when,
        When=when.capitalize(),
    )
    return re.sub(r" +(?=[.,;:]|$)", "", re.sub(r" +", " ", text)).strip()


def split_words(text: str) -> tuple[str, ...]:
    """Returns words in lower case and punctuation marks, in order."""
    return tuple(re.findall(r"[a-z]+|[^\sa-z]", text.lower()))


def words() -> tuple[str, ...]:
    """Returns every word of any instruction, motion text or caption, in lower case and sorted."""
    texts = [
        *(_RELEASED_TEMPLATE, *FULL, *FULL_PHRASINGS, *_CAPTIONS, "the, a hair and with"),
        *itertools.chain(*OPEN.values(), *OPEN_PHRASINGS.values(), *ADVERBS.values()),
        *itertools.chain(*map(dataclasses.astuple, VERBS.values()), *WHEN.values()),
        *(*CHARACTERS, *NAMES, *WHERE.values(), *TIMES),
        *(*ACCESSORIES, *HAIR_COLOURS, *HAIR_STYLES, *CLOTHES),
        *itertools.chain(*LOOKS_OF_VARIANTS.values()),
        *itertools.chain(*(views.values() for views in LOOKS_OF_VIEWS.values())),
    ]
    found = (split_words(re.sub(r"\{\w+\}", " ", text)) for text in texts)
    return tuple(sorted({word for text in found for word in text if word.isalpha()}))


def vocabulary() -> Vocabulary:
    """Returns the words that a prompt or a page offers for the toy world."""
    motions = (
        verb.gerund.format(partner=partner)
        for name, verb in VERBS.items()
        if name != STANDING
        for partner in (CHARACTERS if "{" in verb.gerund else ("",))
    )
    return Vocabulary(
        characters=CHARACTERS,
        adverbs=tuple(itertools.chain(*ADVERBS.values())),
        motions=tuple(motions),
        times=TIMES,
        places=PLACES,
        examples=("Mika is gently waving in the town by day.", "Go on, faster."),
        effects={
            motion: _EFFECTS[name]
            for name, verb in VERBS.items()
            if name in _EFFECTS
            for partner in (CHARACTERS if "{" in verb.gerund else ("",))
            for motion in (verb.gerund.format(partner=partner),)
        },
    )


def write_tokenizer(folder: Path) -> Path:
    """Writes the toy world's tokenizer and `words.json`; returns the tokenizer's folder."""
    tokenizer = folder / TOKENIZER_FOLDER
    write_word_tokenizer(tokenizer, words())
    text = json.dumps(to_json(vocabulary()), indent=1)
    (folder / WORDS_FILE).write_text(text + "\n")
    return tokenizer
