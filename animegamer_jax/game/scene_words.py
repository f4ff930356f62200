"""The words of an instruction: which parts of a scene it names, and which the model does not know.

All of it works from the vocabulary of the model's world (`words.json`) and its tokenizer; a model
without a vocabulary has no parts.
"""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from animegamer_jax.bundle.vocabulary import Vocabulary

# Words of a sentence that name nothing in a scene.
_FUNCTION_WORDS = frozenset(
    re.split(
        r"\s+",
        "a an and are as at background be but by character does do for from go goes he her his i "
        "in is it its my now of on or our out show she so than that the their them then there "
        "they this through to up was we will with you your",
    )
)
_SUBJECTS = frozenset(("he", "i", "it", "she", "they", "we", "you"))
_PREPOSITIONS = frozenset(("at", "in", "into", "on", "to"))
_ARTICLES = frozenset(("a", "an", "my", "our", "the", "your"))
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
_MOST_NEAR = 3
_LIKE = 0.76  # share of letters in common: jmps is like jump, ramen is not like Ren


@runtime_checkable
class UnknownWords(Protocol):
    """What finds the words that a model does not know (`Tokenizer`)."""

    def unknown_words(self, text: str) -> tuple[str, ...]: ...


class SceneWords(NamedTuple):
    """The parts of a scene that a text names, each as the vocabulary spells it; "" if it does not.

    `partner` is the character at the end of a motion such as "talking to Ren".
    """

    character: str = ""
    adverb: str = ""
    motion: str = ""
    partner: str = ""
    time: str = ""
    place: str = ""


class UnknownWord(NamedTuple):
    """A word that the model does not know, its place in the text, and known words to offer."""

    word: str
    start: int
    end: int
    near: tuple[str, ...]


class Reading(NamedTuple):
    """What the model understands of a line.

    `understood` is False if it knows no word that names something.
    """

    unknown: tuple[UnknownWord, ...]
    understood: bool


def read_scene(text: str, words: Vocabulary) -> SceneWords:
    """Returns the parts of a scene that a text names, in whatever form of the verb."""
    found = [match[0].lower() for match in _WORD.finditer(text)]
    motion, partner = _find_motion(found, words)
    names = [name for name in found if name != partner.lower()] if partner else found
    return SceneWords(
        character=_find(names, words.characters),
        adverb=_find(found, words.adverbs),
        motion=motion,
        partner=partner,
        time=_find(found, words.times),
        place=_find(found, words.places),
    )


def partner_of(motion: str, words: Vocabulary) -> str:
    """Returns the character with whom a motion ends ("talking to Ren"); "" if there is none."""
    last = motion.rpartition(" ")[2]
    return last if " " in motion and last in words.characters else ""


def read_line(text: str, words: Vocabulary, tokenizer: UnknownWords) -> Reading:
    """Returns the words of a line that the model does not know, and whether it knows any other.

    Words that name nothing in a scene ("is", "through") do not count either way.
    """
    missing = {word.lower() for word in tokenizer.unknown_words(text)}
    if not missing:
        return Reading((), understood=True)
    matches = list(_WORD.finditer(text))
    spoken = [match[0] for match in matches]
    unknown, known = [], False
    for number, match in enumerate(matches):
        word = match[0]
        if word.lower() in _FUNCTION_WORDS:
            continue
        if word.lower() in missing or missing.intersection(_pieces(word)):
            near = _near(word, spoken[:number], words)
            unknown.append(UnknownWord(word, match.start(), match.end(), near))
        else:
            known = True
    return Reading(tuple(unknown), understood=known)


def _pieces(word: str) -> list[str]:
    return [piece.lower() for piece in re.split(r"['\u2019-]", word)]


def _near(word: str, before: Sequence[str], words: Vocabulary) -> tuple[str, ...]:
    """Returns known words like an unknown one, or else words for its place in the sentence.

    Empty if neither says what it may be.
    """
    lists = (words.characters, words.motions, words.places, words.times, words.adverbs)
    known = {_stem(phrase.split()[0]): phrase for phrase in reversed(words.motions)}
    known |= {phrase.lower(): phrase for phrases in lists for phrase in phrases}
    for spelling in (word.lower(), _stem(word)):
        found = difflib.get_close_matches(spelling, known, n=_MOST_NEAR, cutoff=_LIKE)
        if found:
            return tuple(dict.fromkeys(known[phrase] for phrase in found))
    return tuple(_of_the_kind(word, before, words)[:_MOST_NEAR])


def _of_the_kind(word: str, before: Sequence[str], words: Vocabulary) -> Sequence[str]:
    """Returns the words that may stand where an unknown one does."""
    last, earlier = ([word.lower() for word in reversed(before)] + ["", ""])[:2]
    if last in _PREPOSITIONS or (last in _ARTICLES and earlier in _PREPOSITIONS):
        return words.places
    if word.endswith("ly"):
        return words.adverbs[:: max(1, len(words.adverbs) // _MOST_NEAR)]
    if word[:1].isupper():
        return words.characters
    named = bool(before) and before[-1][:1].isupper() and last not in _FUNCTION_WORDS
    if named or last in _SUBJECTS or word.endswith(("ing", "s")):
        return words.motions
    return ()


def _find(found: Sequence[str], phrases: Sequence[str]) -> str:
    """Returns the first phrase all of whose words follow each other in the text."""
    best, place = "", len(found)
    for phrase in phrases:
        parts = phrase.lower().split()
        for start in range(len(found) - len(parts) + 1):
            if list(found[start : start + len(parts)]) == parts and start < place:
                best, place = phrase, start
    return best


def _find_motion(found: Sequence[str], words: Vocabulary) -> tuple[str, str]:
    """Returns the motion that a text names and its partner."""
    stems = [_stem(word) for word in found]
    best, rank = "", (0, 0)
    for motion in words.motions:
        parts = motion.lower().split()
        if _stem(parts[0]) not in stems:
            continue
        start = stems.index(_stem(parts[0]))
        partner = partner_of(motion, words).lower()
        if partner and partner not in found[start:]:
            continue
        present = sum(part in found for part in parts[1:])
        if (present, -start) > rank or not best:
            best, rank = motion, (present, -start)
    return best, partner_of(best, words)


def _stem(word: str) -> str:
    """Returns what the forms of an English verb have in common: wave, waves and waving."""
    word = word.lower()
    for end in ("ing", "ies", "es", "ed", "s", "e"):
        if word.endswith(end) and len(word) - len(end) >= 2:
            word = word[: -len(end)] + ("y" if end == "ies" else "")
            break
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word
