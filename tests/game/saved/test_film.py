"""A game as a film with captions."""

import numpy as np
import pytest
from PIL import Image
from saved_games import make_game

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved.film import film_gif, film_mp4, plain_text
from animegamer_jax.media import video


def test_a_film_has_every_clip_with_its_caption(game, tmp_path):
    for captions in (True, False):
        film_mp4(game, tmp_path / f"{captions}.mp4", captions=captions)
    film, plain = (video.read_mp4(tmp_path / f"{captions}.mp4") for captions in (True, False))
    assert film.shape == plain.shape == (15, 240, 360, 3)
    apart = np.abs(film.astype(int) - plain.astype(int)).max(axis=(0, 2, 3))
    assert apart[:150].max() < 8  # the upper part is the clip's
    assert apart[-40:].max() > 200  # white letters on a dark clip
    assert not np.array_equal(film[0, -40:], film[5, -40:])  # another instruction
    assert film.max() > 230


def test_a_film_as_a_gif(game, tmp_path):
    film_gif(game, tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as found:
        assert (found.size, found.info["loop"]) == ((360, 240), 0)
        seconds = 0
        for frame in range(found.n_frames):
            found.seek(frame)
            seconds += found.info["duration"] / 1000
        assert seconds == pytest.approx(15 * 0.12, abs=0.2)  # GIF counts hundredths


def test_a_game_without_turns_has_no_film(tmp_path):
    game = make_game(tmp_path / "empty")
    for make in (film_mp4, film_gif):
        with pytest.raises(UserError, match="no turns yet: play one first"):
            make(game, tmp_path / "film")


def test_instructions_without_their_labels():
    assert plain_text("Character: Mika; Motion: waving; Background: day town.") == (
        "Mika \u00b7 waving \u00b7 day town"
    )
    assert plain_text("Mika waves: hello; and goes.") == "Mika waves: hello; and goes."
