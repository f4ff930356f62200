"""The words of the benchmark `paper`: names, motions with their rules, places, times.

All of them were written for this project; the names are common given names.
"""

import dataclasses

CHARACTERS: tuple[str, ...] = (
    "Aki", "Botan", "Chika", "Daiki", "Emi", "Fumi", "Goro", "Haru", "Ichiro", "Jun",
    "Kaede", "Miyo", "Nao", "Osamu", "Rika", "Saki", "Tsubaki", "Umi", "Wataru", "Yoko",
)  # fmt: skip
"""Twenty names, as many as the paper's benchmark has."""

ADVERBS: dict[int, tuple[str, ...]] = {
    1: ("barely", "faintly", "sleepily", "silently"),
    2: ("gently", "slowly", "softly", "calmly"),
    3: ("steadily", "evenly", "smoothly", "easily"),
    4: ("quickly", "briskly", "swiftly", "eagerly"),
    5: ("wildly", "furiously", "frantically", "madly"),
}
"""Adverbs by the motion level that they mean."""

TIMES = ("dawn", "morning", "day", "afternoon", "evening", "night")

PLACES: dict[str, tuple[str, ...]] = {
    "home": ("bedroom", "kitchen", "living room", "attic", "balcony", "study", "tea room"),
    "hall": (
        "library", "classroom", "museum", "workshop", "bakery", "inn", "theatre", "greenhouse",
        "market", "station", "train", "temple",
    ),
    "land": (
        "meadow", "forest", "beach", "garden", "village", "town square", "street", "park",
        "farmyard", "hillside", "mountain path", "riverbank", "bridge", "harbour", "shrine",
        "castle courtyard", "orchard", "rice field", "snowfield", "desert", "playground",
        "bamboo grove", "rooftop", "cliff top",
    ),
    "water": ("lake", "river", "sea", "pond", "hot spring"),
    "sky": ("sky", "clouds", "starry sky"),
}  # fmt: skip
"""Places by kind, which decides the motions that are possible there."""

_DRY = ("home", "hall", "land")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Motion:
    """A motion and its effect on the character's states.

    Attributes:
        text: The -ing form; `{partner}` stands for another character.
        levels: Lowest and highest possible motion level.
        kinds: Kinds of places where it is possible.
        thrills_from: Motion level from which it is entertainment; 6: never.
        rests_up_to: Motion level up to which it gives stamina, and above which it costs stamina.
    """

    text: str
    levels: tuple[int, int]
    kinds: tuple[str, ...]
    thrills_from: int
    rests_up_to: int

    @property
    def is_social(self) -> bool:
        """Whether somebody else is dealt with."""
        return "{partner}" in self.text


def _alike(
    levels: tuple[int, int],
    kinds: tuple[str, ...],
    texts: tuple[str, ...],
    *,
    thrills_from: int = 6,
    rests_up_to: int = 0,
) -> tuple[Motion, ...]:
    """Makes motions under the same rules."""
    return tuple(
        Motion(
            text=text,
            levels=levels,
            kinds=kinds,
            thrills_from=thrills_from,
            rests_up_to=rests_up_to,
        )
        for text in texts
    )


MOTIONS: tuple[Motion, ...] = (
    # rest
    *_alike(
        (1, 3),
        _DRY,
        (
            "sitting down", "lying down", "napping", "closing the eyes", "leaning back", "kneeling",
            "daydreaming", "looking around", "eating a rice ball", "drinking tea", "eating bread",
            "listening to the wind",
        ),
        rests_up_to=5,
    ),
    *_alike((1, 2), ("home",), ("sleeping", "dozing under a blanket"), rests_up_to=5),
    *_alike((1, 3), ("water",), ("floating on the back", "bathing"), rests_up_to=5),
    *_alike((1, 3), ("sky",), ("drifting in a balloon", "lying on a cloud"), rests_up_to=5),
    # small gestures and quiet work
    *_alike(
        (1, 3),
        _DRY,
        (
            "turning the head", "nodding", "looking up", "looking back", "tilting the head",
            "raising a hand", "opening an umbrella", "holding a lantern", "reading a book",
            "writing a letter", "drawing a picture", "knitting a scarf", "looking at a map",
            "folding paper cranes", "sewing a coat",
        ),
        rests_up_to=2,
    ),
    # work
    *_alike(
        (2, 4),
        ("home", "hall"),
        (
            "washing dishes", "sweeping the floor", "kneading dough", "stirring a pot",
            "carrying a tray", "dusting shelves", "folding clothes", "moving boxes",
            "cleaning windows",
        ),
    ),
    *_alike(
        (2, 5),
        ("land",),
        (
            "gathering fruit", "carrying buckets", "chopping wood", "digging a hole",
            "watering flowers", "pulling a cart", "raking leaves", "planting seeds",
            "building a fence", "pushing a wheelbarrow",
        ),
    ),
    # going somewhere
    *_alike((1, 4), _DRY, ("walking", "tiptoeing", "strolling", "wandering"), rests_up_to=1),
    *_alike((3, 5), _DRY, ("running", "hopping", "jumping", "hurrying")),
    *_alike(
        (3, 5),
        ("land",),
        (
            "riding a bicycle", "riding a horse", "climbing a tree", "jumping over stones",
            "rolling downhill", "racing along",
        ),
        thrills_from=4,
    ),
    *_alike(
        (2, 5),
        ("water",),
        ("swimming", "rowing a boat", "wading", "paddling a raft", "diving"),
        thrills_from=4,
    ),
    *_alike((1, 3), ("water",), ("fishing",), thrills_from=1, rests_up_to=2),
    *_alike(
        (2, 5),
        ("sky",),
        ("flying on a broomstick", "gliding", "soaring", "circling", "riding a dragon"),
        thrills_from=3,
    ),
    # play
    *_alike(
        (2, 5),
        _DRY,
        (
            "dancing", "singing", "spinning around", "juggling balls", "clapping the hands",
            "laughing", "bouncing a ball", "blowing bubbles", "beating a drum",
        ),
        thrills_from=1,
    ),
    *_alike(
        (1, 3),
        _DRY,
        ("playing the flute", "playing the violin", "humming a tune", "playing with a top"),
        thrills_from=1,
        rests_up_to=2,
    ),
    *_alike(
        (2, 5),
        ("land",),
        (
            "flying a kite", "skipping rope", "chasing butterflies", "splashing in puddles",
            "playing on a swing", "throwing leaves", "balancing on a log", "turning cartwheels",
            "playing hopscotch",
        ),
        thrills_from=1,
    ),
    # together
    *_alike(
        (1, 4),
        _DRY,
        (
            "talking to {partner}", "waving to {partner}", "whispering to {partner}",
            "listening to {partner}", "bowing to {partner}", "holding hands with {partner}",
            "giving flowers to {partner}", "comforting {partner}", "smiling at {partner}",
            "eating lunch with {partner}",
        ),
        rests_up_to=3,
    ),
    *_alike(
        (2, 5),
        _DRY,
        (
            "hugging {partner}", "helping {partner}", "shouting to {partner}",
            "running to {partner}", "arguing with {partner}", "carrying bags for {partner}",
        ),
    ),
    *_alike(
        (2, 5),
        _DRY,
        (
            "dancing with {partner}", "singing with {partner}", "playing catch with {partner}",
            "laughing with {partner}", "playing cards with {partner}",
        ),
        thrills_from=1,
    ),
    *_alike((3, 5), ("land",), ("chasing {partner}", "racing with {partner}"), thrills_from=1),
    *_alike((2, 5), ("water",), ("swimming with {partner}",), thrills_from=1),
    *_alike((2, 5), ("sky",), ("flying with {partner}",), thrills_from=1),
)  # fmt: skip
