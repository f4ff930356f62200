"""How one speaks of the toy world: instructions, motion texts and captions, of a closed vocabulary.

An instruction is a form (a sentence with gaps) of a kind; the kind names what the sentence tells.
`FULL` tells everything. Forms of an open kind leave the rest to the turns before. `FRESH` forms
are those of the split `phrasings`, which training never sees, made of words that it sees.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Literal

import numpy as np

from animegamer_jax.bundle.config import to_json
from animegamer_jax.bundle.vocabulary import TOKENIZER_FOLDER, WORDS_FILE, Vocabulary
from animegamer_jax.tokenizer import write_word_tokenizer
from animegamer_jax.toy.scene import (
    CHARACTERS,
    LEVELS,
    PLACES,
    TIMES,
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
_PLAIN_LEVEL = 3  # of a full instruction without an adverb


@dataclasses.dataclass(frozen=True)
class Verb:
    """A motion's three forms; `{partner}` stands for who is talked to."""

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
}
WHERE = {place: f"{'on' if place == 'beach' else 'in'} the {place}" for place in PLACES}
WHEN = {"day": ("by day", "in the day"), "night": ("by night", "at night")}

_RELEASED = "Character: {character}; Motion: {adverb} {gerund}; Background: {time} {place}."
FULL: tuple[str, ...] = (
    "{character} {third} {adverb} {where} {when}.",
    "{When}, {character} is {adverb} {gerund} {where}.",
    "{character} is {adverb} {gerund} {where} {when}.",
    "Show {character} {adverb} {gerund} {where} {when}.",
    "It is {time} {where} and {character} {third} {adverb}.",
)
FULL_FRESH: tuple[str, ...] = (
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
OPEN_FRESH: dict[Kind, tuple[str, ...]] = {
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
_CAPTION_PARTS: tuple[str, ...] = (
    "{character} {where}",
    "{character} {when}",
    "{where} {when}",
    "{time} {place}",
    "{character} {gerund}",
    "{adverb} {gerund} {where}",
    "{character} is {adverb} {gerund}",
    "{character} {where} {when}",
)
_RELEASED_SHARE = 0.5


def write_instruction(scene: Scene, *, kind: Kind, split: str, rng: np.random.Generator) -> str:
    """A sentence that tells what its kind says of the scene."""
    if split == "phrasings":
        forms = FULL_FRESH if kind == "full" else OPEN_FRESH[kind]
    elif kind == "full":
        forms = (_RELEASED,) if rng.random() < _RELEASED_SHARE else FULL
    else:
        forms = OPEN[kind]
    plain = kind == "full" and scene.level == _PLAIN_LEVEL and rng.random() < 0.5
    adverb = "" if plain else str(rng.choice(ADVERBS[scene.level]))
    return _fill(str(rng.choice(forms)), scene, adverb=adverb, rng=rng)


def write_motion(scene: Scene, rng: np.random.Generator) -> str:
    """The motion in full, as T5 reads it: "quickly flying on a broom"."""
    return _fill("{adverb} {gerund}", scene, adverb=str(rng.choice(ADVERBS[scene.level])), rng=rng)


def write_caption(scene: Scene, rng: np.random.Generator) -> str:
    """The scene in full, as CLIP reads it, in one of a few wordings."""
    adverb = str(rng.choice(ADVERBS[scene.level]))
    return _fill(str(rng.choice(_CAPTIONS)), scene, adverb=adverb, rng=rng)


def write_partial_captions(scene: Scene, rng: np.random.Generator) -> tuple[str, ...]:
    """Captions that leave parts out: character, place and time alone, and one mixture."""
    adverb = str(rng.choice(ADVERBS[scene.level]))
    forms = (
        "{character}",
        str(rng.choice(("the {place}", "{where}"))),
        str(rng.choice(("{time}", "{when}"))),
        str(rng.choice(_CAPTION_PARTS)),
    )
    return tuple(_fill(form, scene, adverb=adverb, rng=rng) for form in forms)


def _fill(form: str, scene: Scene, *, adverb: str, rng: np.random.Generator) -> str:
    verb = VERBS[scene.motion]
    when = str(rng.choice(WHEN[scene.time]))
    text = form.format(
        character=scene.character,
        adverb=adverb,
        Adverb=adverb.capitalize(),
        **{
            name: value.format(partner=scene.partner)
            for name, value in dataclasses.asdict(verb).items()
        },
        place=scene.place,
        where=WHERE[scene.place],
        Where=WHERE[scene.place].capitalize(),
        time=scene.time,
        when=when,
        When=when.capitalize(),
    )
    return re.sub(r" +(?=[.,;:]|$)", "", re.sub(r" +", " ", text)).strip()


def split_words(text: str) -> tuple[str, ...]:
    """Words in lower case and punctuation marks, in order."""
    return tuple(re.findall(r"[a-z]+|[^\sa-z]", text.lower()))


def words() -> tuple[str, ...]:
    """Every word that any instruction, motion text or caption can hold, sorted, in lower case."""
    forms = (_RELEASED, *FULL, *FULL_FRESH, *_CAPTIONS, *_CAPTION_PARTS, "the {place}")
    opened = (form for table in (OPEN, OPEN_FRESH) for kind in table.values() for form in kind)
    literal = (re.sub(r"\{\w+\}", " ", form) for form in (*forms, *opened))
    verbs = (
        form.replace("{partner}", "")
        for verb in VERBS.values()
        for form in dataclasses.astuple(verb)
    )
    adverbs = (adverb for level in LEVELS for adverb in ADVERBS[level])
    whens = (when for time in TIMES for when in WHEN[time])
    texts = (*literal, *verbs, *adverbs, *whens, *CHARACTERS, *WHERE.values(), *TIMES)
    return tuple(sorted({word for text in texts for word in split_words(text) if word.isalpha()}))


def vocabulary() -> Vocabulary:
    """Returns the words that a prompt or a page offers for the toy world."""
    motions = (
        verb.gerund.format(partner=partner)
        for verb in VERBS.values()
        for partner in (CHARACTERS if "{" in verb.gerund else ("",))
    )
    return Vocabulary(
        characters=CHARACTERS,
        adverbs=tuple(adverb for level in LEVELS for adverb in ADVERBS[level]),
        motions=tuple(motions),
        times=TIMES,
        places=PLACES,
        examples=("Mika is gently waving in the town by day.", "Go on, faster."),
    )


def write_tokenizer(folder: Path) -> Path:
    """Writes the toy world's tokenizer and `words.json`; returns the tokenizer's folder."""
    tokenizer = folder / TOKENIZER_FOLDER
    write_word_tokenizer(tokenizer, words())
    text = json.dumps(to_json(vocabulary()), indent=1)
    (folder / WORDS_FILE).write_text(text + "\n")
    return tokenizer
