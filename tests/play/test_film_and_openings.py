"""`animegamer film` and `animegamer openings`, as a user calls them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from saved_games import add_turn, make_game

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.cli import main
from animegamer_jax.errors import UserError
from animegamer_jax.game import openings
from animegamer_jax.game.player import Player
from animegamer_jax.media import video


def test_a_saved_game_becomes_a_film(tmp_path, capsys):
    game = make_game(tmp_path / "game")
    for _ in range(2):
        add_turn(game)
    assert main(["film", str(game.folder)]) == 0
    assert "film.mp4: 2 turns" in capsys.readouterr().out
    assert len(video.read_mp4(game.folder / "film.mp4")) == 10
    assert main(["film", str(game.folder), "--out", str(tmp_path / "a" / "b.gif")]) == 0
    assert (tmp_path / "a" / "b.gif").read_bytes().startswith(b"GIF8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere/game.json"),
        (["nowhere", "--out", "film.avi"], "expected a name that ends with .mp4 or .gif"),
    ],
)
def test_what_is_no_film(words, message, capsys):
    assert main(["film", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def bundle(tiny_bundle, tmp_path_factory) -> Path:
    """A tiny model with a few words, and its first shots."""
    folder = tmp_path_factory.mktemp("openings") / "bundle"
    shutil.copytree(tiny_bundle, folder)
    words = {"characters": ["a", "b"], "motions": ["walk"], "times": ["day"], "places": ["c", "d"]}
    (folder / "words.json").write_text(json.dumps(words))
    assert main(["openings", "--model", str(folder), "--steps", "1"]) == 0
    return folder


def test_first_shots_are_games_to_play_on_from(bundle, tmp_path):
    found = openings.read_openings(epath.Path(bundle))
    assert set(found.games) == {("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")}
    assert found.portraits is not None
    assert all(path.is_file() for path in found.sheets.values())
    opening = found.games["b", "d"]
    assert opening.turns[0].instruction == "Character: b; Motion: walk; Background: day d."
    game = opening.branch(tmp_path / "game", 1, seed=77, rules="day")
    assert (game.seed, game.rules, len(game.history())) == (77, "day", 1)
    assert not (bundle / "openings" / "unfinished").exists()


def test_first_shots_are_rounded_to_save_space(bundle, tmp_path):
    """To the precision of float16, from what the player made; that of one shot is compared."""
    found = openings.read_openings(epath.Path(bundle)).games["a", "c"]
    (kept,) = found.history()
    player = Player.from_bundle(Bundle.open(bundle), steps=1)
    instruction = found.turns[0].instruction
    _, output = player.play_turn(player.start(1), [instruction], seeds=[found.seed], turn=1)
    played = output.representation[0]
    assert not np.array_equal(kept.representation, played)
    np.testing.assert_allclose(kept.representation, played, rtol=2**-11, atol=0)
    mantissa, _ = np.frexp(kept.representation)
    np.testing.assert_array_equal(mantissa * 2**11, np.rint(mantissa * 2**11))


def test_first_shots_of_other_weights_are_not_offered(bundle, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"name"', '"name" ', 1))
    assert openings.read_openings(epath.Path(other)).games == {}
    (bundle / "openings" / "portraits.webp").rename(bundle / "away")
    with pytest.raises(UserError, match=r"portraits\.webp: expected pictures of the first shots"):
        openings.read_openings(epath.Path(bundle))
    (bundle / "away").rename(bundle / "openings" / "portraits.webp")


def test_a_model_without_words_has_no_first_shots(tiny_bundle, capsys):
    assert openings.read_openings(epath.Path(tiny_bundle)).games == {}
    assert main(["openings", "--model", str(tiny_bundle)]) == 2
    assert "expected characters, motions and places in words.json" in capsys.readouterr().err
    assert main(["openings", "--steps", "0"]) == 2


def test_the_embedded_first_shots_are_those_of_the_embedded_model():
    bundle = Bundle.open("toy")
    found = openings.read_openings(bundle.path)
    words = bundle.vocabulary
    assert set(found.games) == {
        (who, where) for who in words.characters for where in words.places
    }, "make them again: animegamer openings"
    assert found.characters == words.characters
