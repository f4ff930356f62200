"""Annotated films for sets of games."""

from annotated_shots import SECONDS, Take, annotate, film_name, label, make_shots

from animegamer_jax.data.datasets import open_games

FILM = film_name(0)


def takes(count: int, *, per_scene: int = 2, first_value: float = 0.5) -> list[Take]:
    """Scenes that are far apart; every fifth clip is dropped."""
    return [
        Take(
            scene=number // per_scene,
            start=number * SECONDS + 20.0 * (number // per_scene),
            dropped="still" if number % 5 == 4 else None,
            value=first_value + number,
        )
        for number in range(count)
    ]


def annotated(path, *films: int):
    """Films with that number of clips each: every seventh is set aside, every third is nobody's."""
    shots = make_shots(
        path, [takes(count, first_value=0.5 + n / 3) for n, count in enumerate(films)]
    )
    for number, count in enumerate(films):
        kept = [n for n in range(count) if n % 5 != 4]
        aside = [n for n in kept if n % 7 == 6]
        labels = [
            label(n, subject="none" if n % 3 == 2 else "Mika") for n in kept if n not in aside
        ]
        annotate(shots, number, labels, aside=aside)
    return shots


def turns_of(path) -> dict[str, list[dict]]:
    games = open_games(path)
    return {
        split: [games.turns(split)[number] for number in range(count)]
        for split, count in games.info.splits.items()
    }
