"""The model that comes with the package: it fits, plays, answers, and says what it scores."""

import dataclasses
import json
import re
from pathlib import Path

import embed
import numpy as np
import pytest

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.embedded import ASSETS
from animegamer_jax.errors import UserError
from animegamer_jax.game.player import Player
from animegamer_jax.toy.scene import Scene
from animegamer_jax.toy.scoring.attributes import labels
from animegamer_jax.toy.scoring.classifier import load_classifier, read_clips
from animegamer_jax.toy.world import PROTOCOL

TOY = ASSETS / "toy"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open("toy")


def test_only_a_text_is_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="toy: not a bundle"):
        Bundle.open(Path("toy"))


def test_it_is_small_and_has_a_card(bundle):
    assert Path(str(bundle.path)) == Path(str(TOY))
    sizes = {path: path.stat().st_size for path in TOY.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= 24e6
    assert sum(size for path, size in sizes.items() if "openings" not in path.parts) <= 20e6
    card = (TOY / "README.md").read_text()
    assert re.search(r"Written \d{4}-\d\d-\d\d by `scripts/toy/embed.py` of commit \w{7,}", card)
    for stage in embed.STAGES:
        assert re.search(rf"^\| {stage} \| [\d,]+ \| \d+ \| [\d.e-]+ \| \w+ \| \d+ \|$", card, re.M)


def test_the_card_has_the_stored_scores_of_these_weights(bundle):
    stored = json.loads((TOY / embed.SCORES_FILE).read_text())
    assert stored["embedded"] == bundle.digest()
    assert stored["scored"] in (stored["trained"], stored["embedded"])
    card = (TOY / "README.md").read_text().splitlines()
    table = list(embed.describe_scores(stored["systems"]))
    assert len(table) > 15
    start = card.index(table[0])
    assert card[start : start + len(table)] == table


def test_it_plays_by_the_toy_worlds_protocol(bundle):
    assert bundle.protocol == PROTOCOL
    stored = json.loads((TOY / "config.json").read_text())
    assert stored["name"] == "toy"


@pytest.mark.slow  # compiles the whole turn
def test_it_shows_who_is_named_and_knows_who_where_and_when_from_the_turn_before(bundle):
    """As the world's network reads the clips; the second instruction is open."""
    player = Player.from_bundle(bundle)
    first = [
        Scene("Mika", "wave", "meadow", "day", level=2, partner=None),
        Scene("Mika", "wave", "snow", "night", level=2, partner=None),
    ]
    turns = [
        [f"Character: Mika; Motion: gently waving; Background: {s.time} {s.place}." for s in first],
        ["Then run."] * 2,
    ]
    scenes = [first, [dataclasses.replace(scene, motion="run") for scene in first]]
    states = [[2, 1, 0, 1], [4, 0, 1, -1]]  # level, social, entertainment, stamina: Mika is quick
    window, classifier = player.start(2), load_classifier()
    for number, instructions in enumerate(turns):
        window, output = player.play_turn(window, instructions, seeds=[0, 1], turn=number + 1)
        read = read_clips(classifier, output.frames)
        for name in ("character", "place", "time"):
            expected = labels(scenes[number], name)
            np.testing.assert_array_equal(read[name], expected, err_msg=f"{number}: {name}")
        np.testing.assert_array_equal(output.states, [states[number]] * 2)
