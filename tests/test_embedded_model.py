"""The model that comes with the package: it fits, plays, answers, and says what it scores."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from animegamer_jax.bundle import Bundle
from animegamer_jax.data.toyworld import PROTOCOL
from animegamer_jax.play import ASSETS, model_folder
from animegamer_jax.player import Player

TOY = ASSETS / "toy"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(model_folder("toy"))


def test_it_is_small_and_has_a_card(bundle):
    assert Path(str(bundle.path)) == Path(str(TOY))
    size = sum(path.stat().st_size for path in Path(str(TOY)).rglob("*") if path.is_file())
    assert size <= 12e6
    card = (Path(str(TOY)) / "README.md").read_text()
    for word in ("Recipe", "seed", "Scores", "commit", "ACC-F", "ACC-S"):
        assert word in card
    assert re.search(r"Written \d{4}-\d\d-\d\d", card)


def test_it_plays_by_the_toy_worlds_protocol(bundle):
    assert bundle.protocol == PROTOCOL
    stored = json.loads((Path(str(TOY)) / "config.json").read_text())
    assert stored["name"] == "toy"


@pytest.mark.slow  # compiles the whole turn
def test_it_knows_who_where_and_when_from_the_turns_before(bundle):
    """What an open instruction leaves out changes neither the picture's place nor its time."""
    player = Player.from_bundle(bundle, steps=8)
    said = [
        ("Character: Mika; Motion: gently waving; Background: day meadow.", "Then run."),
        ("Character: Mika; Motion: gently waving; Background: night snow.", "Then run."),
    ]
    window = player.start(2)
    first = None
    for turn in (1, 2):
        window, output = player.play_turn(
            window, [game[turn - 1] for game in said], seeds=[0, 1], turn=turn
        )
        frames = np.asarray(output.frames, np.float32)
        if first is None:
            first = frames
    border = frames[:, :, :12], first[:, :, :12]  # the sky, which nobody hides
    own = [np.abs(border[0][game].mean(0) - border[1][game].mean(0)).mean() for game in (0, 1)]
    other = np.abs(border[0][0].mean(0) - border[1][1].mean(0)).mean()
    assert max(own) < 20 < other
    assert output.states[:, 0].min() >= 1
