"""A player's own picture as a turn: what stands in the window, and what it changes."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_games
import tiny_sets

from animegamer_jax.bundle.bundle import Bundle, BundleWriter
from animegamer_jax.configs import ModelConfig
from animegamer_jax.data.datasets import open_features, open_games
from animegamer_jax.data.features import write_features
from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.game.instructions import motion_of
from animegamer_jax.game.pictures import PictureEncoder, check_networks, still_states
from animegamer_jax.game.player import Player
from animegamer_jax.game.saved_game import Game
from animegamer_jax.media.pictures import Picture
from animegamer_jax.protocol import PAPER, RELEASED

ALL = ("mllm", "encoder", "dit", "vae", "t5", "clip")
TEXT = "Mika; Motion: waves gently; day"


def picture(seed: int = 0, *, height: int = 16, width: int = 24) -> Picture:
    rng = np.random.default_rng(seed)
    return Picture(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    return tiny_games.write_model(tmp_path_factory.mktemp("bundle"), networks=ALL)


@pytest.fixture(scope="module")
def player(bundle) -> Player:
    return Player.from_bundle(bundle, steps=2)


def play(player: Player, window, texts=("mika waves",)) -> list:
    outputs = []
    for turn, text in enumerate(texts, 1):
        window, output = player.play_turn(window, [text], seeds=[7], turn=turn)
        outputs.append(output)
    return outputs


def test_the_motion_of_a_text():
    assert motion_of("Character: Hana; Motion: standing; Background: day town.") == "standing"
    assert motion_of("Motion: quickly flying on broomstick.") == "quickly flying on broomstick"
    assert motion_of("character: hana; motion:  slow walk") == "slow walk"
    for text in ("Hana stands in the town.", "Character: Hana; Background: day.", "Motion: ."):
        assert motion_of(text) == text


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        (PAPER, [1, 0, 0, 1]),
        (RELEASED, [1, 0, 0, 1]),
        (dataclasses.replace(PAPER, stamina=(-2, -1, 1), motion_levels=(2, 3)), [2, 0, 0, 1]),
    ],
)
def test_states_of_standing_still(protocol, expected):
    assert still_states(protocol).tolist() == expected


def test_the_window_holds_what_training_has(bundle, player, tmp_path):
    """E_a of the features that `data features` computes of the same frame and motion."""
    games = open_games(tiny_sets.write_games(tmp_path / "games", {"train": 1}))
    write_features(
        tmp_path / "features",
        bundle=bundle,
        games=games,
        num_text_tokens=tiny_sets.TEXT[0],
        batch_size=8,
    )
    features = open_features(tmp_path / "features").turns("train")
    encoder = bundle.load("encoder")
    for number in (0, 3):
        turn = games.turns("train")[number]
        frame = tiny_sets.frames_of(turn)[0]
        text = f"Mika; Motion: {turn['motion_text']}; day"
        window = player.start(pictures=[(Picture(frame), text)])
        record = features[number]
        expected = encoder(
            jnp.asarray(record["text_features"][None], jnp.float32),
            jnp.asarray(record["image_features"][None], jnp.float32),
        )
        # Features are stored in float16.
        np.testing.assert_allclose(window.representations[0, -1], expected[0], atol=2e-3)
        captions, length = player.tokenizer.caption(text, player.protocol.caption_length)
        np.testing.assert_array_equal(window.captions[0, -1], captions)
        assert window.caption_lengths[0].tolist() == [0, length]
        assert window.states[0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 1]]
        assert window.num_turns.tolist() == [1]


def test_a_decoder_that_remembers_sees_the_picture(tmp_path):
    """As the VAE encodes it, in the units of the decoder; and it changes the clip."""
    bundle = tiny_games.write_model(tmp_path / "model", networks=ALL, memory=1)
    player = Player.from_bundle(bundle, steps=2)
    shown = picture()
    window = player.start(2, pictures=[(shown, TEXT), None])
    frame = jnp.asarray(shown.pixels[None, None], jnp.float32) / 127.5 - 1
    moments = jax.jit(lambda vae, frame: vae.encode(frame))(bundle.load("vae"), frame)
    expected = np.split(np.asarray(moments)[0, 0], 2, axis=-1)[0] * bundle.config.vae.scaling_factor
    np.testing.assert_allclose(window.first_latents[0, 0], expected, atol=1e-4)
    assert not np.asarray(window.first_latents[1]).any()

    def clip(window):
        return player.play_turn(window, ["mika waves"] * 2, seeds=[7, 7], turn=1)[1].frames

    unseen = clip(window._replace(first_latents=jnp.zeros_like(window.first_latents)))
    seen = clip(window)
    np.testing.assert_array_equal(seen[1], unseen[1])
    assert np.abs(seen[0].astype(int) - unseen[0]).max() > 1


def test_another_picture_is_another_first_turn(player):
    (one,), (same,), (other,) = (
        play(player, player.start(pictures=[(picture(seed), TEXT)])) for seed in (1, 1, 2)
    )
    (without,) = play(player, player.start())
    np.testing.assert_array_equal(one.frames, same.frames)
    np.testing.assert_array_equal(one.representation, same.representation)
    for found in (other, without):
        assert np.abs(one.representation - found.representation).max() > 1e-3
        assert (one.frames != found.frames).mean() > 0.01


def test_another_text_is_another_turn(player):
    windows = [
        player.start(pictures=[(picture(), text)]) for text in (TEXT, TEXT.replace("waves", "runs"))
    ]
    tokens = [np.asarray(window.representations[0, -1]) for window in windows]
    num_text = tiny_sets.TEXT[0]
    assert np.abs(tokens[0][:num_text] - tokens[1][:num_text]).max() > 1e-2
    np.testing.assert_array_equal(tokens[0][num_text:], tokens[1][num_text:])


def test_the_picture_slides_out_like_any_turn(player):
    """With a window of 3, turn 3 is the first that does not see it."""
    texts = ("mika waves", "ren runs", "mika runs")
    first, second = (player.represent(picture(seed), TEXT) for seed in (1, 2))
    turns = play(player, player.restore([[first]]), texts)
    window = player.restore([[first]])
    for turn, text in enumerate(texts[:2], 1):
        window, _ = player.play_turn(window, [text], seeds=[7], turn=turn)
    played = [
        first._replace(instruction=t, representation=o.representation[0], states=o.states[0])
        for t, o in zip(texts, turns, strict=True)
    ]
    for start in (first, second):
        restored = player.restore([[start, *played[:2]]])
        for expected, found in zip(window, restored, strict=True):
            np.testing.assert_array_equal(expected, found)


def test_games_with_and_without_pictures_in_one_batch(player):
    pictures = [(picture(1), TEXT), None, (picture(2), TEXT)]
    window = player.start(3, pictures=pictures)
    assert window.num_turns.tolist() == [1, 0, 1]
    _, output = player.play_turn(window, ["mika waves"] * 3, seeds=[7] * 3, turn=1)
    for row, given in enumerate(pictures):
        (alone,) = play(player, player.start(pictures=[given]))
        np.testing.assert_array_equal(alone.states[0], output.states[row])
        np.testing.assert_allclose(alone.representation[0], output.representation[row], atol=2e-5)
    with pytest.raises(UserError, match="pictures: expected 2, one for each game or None, found 3"):
        player.start(2, pictures=pictures)


def test_a_resumed_game_is_the_uninterrupted_one(player, tmp_path):
    texts, options = ("mika waves", "ren runs", "mika runs"), {"model": "tiny", "seed": 7}
    new = player.represent(picture(), TEXT)
    game = Game.create(
        tmp_path / "game", **options, window=3, steps=2, protocol="paper", picture=new
    )
    whole = play(player, player.start(pictures=[(picture(), TEXT)]), texts)
    for turn, text in enumerate(texts, 1):
        window = player.restore([Game.load(game.folder).history()])
        _, output = player.play_turn(window, [text], seeds=[7], turn=turn)
        np.testing.assert_array_equal(output.frames, whole[turn - 1].frames)
        np.testing.assert_array_equal(output.representation, whole[turn - 1].representation)
        game.add(output.row(0), text)


def test_a_picture_under_a_history_of_what_was_shown(bundle, player):
    """It enters the window as without; the turns after it as they were shown."""
    shown = Player.from_bundle(bundle, steps=2, history="shown")
    windows = [p.start(pictures=[(picture(), TEXT)]) for p in (player, shown)]
    for one, other in zip(*windows, strict=True):
        np.testing.assert_array_equal(one, other)
    first = shown.represent(picture(), TEXT)
    window, output = shown.play_turn(windows[1], ["mika waves"], seeds=[7], turn=1)
    played = first._replace(
        instruction="mika waves",
        representation=output.representation[0],
        states=output.states[0],
    )
    for expected, found in zip(window, shown.restore([[first, played]]), strict=True):
        np.testing.assert_array_equal(expected, found)


def test_pictures_of_any_size_are_fitted(player):
    for height, width in ((64, 96), (100, 40), (16, 200)):
        found = player.represent(picture(height=height, width=width), TEXT)
        assert found.pixels.shape == (16, 24, 3)
        assert found.representation.shape == (tiny_games.NUM_QUERIES, 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^hero: expected a text with the picture, found none: say who is in it"),
        (" \t ", "expected a text with the picture"),
        ("a\x00b", "a control character"),
        ("mika " * 9, "^hero: its text: the instruction has 9 tokens, the model reads 8"),
    ],
)
def test_texts_that_cannot_be_used(player, text, message):
    with pytest.raises(UserError, match=message):
        player.represent(picture(), text, name="hero")


def test_a_window_without_past_turns_takes_no_picture(bundle):
    player = Player.from_bundle(bundle, window=1, steps=2)
    with pytest.raises(UserError, match="window 1: it holds no past turn, so that a picture"):
        player.start(pictures=[(picture(), TEXT)])


@pytest.mark.parametrize(
    ("networks", "missing"),
    [
        (("mllm", "encoder", "dit", "vae"), "clip and t5"),
        (("mllm", "encoder", "dit", "vae", "t5"), "clip"),
        (("mllm", "encoder", "dit", "vae", "clip"), "t5"),
    ],
)
def test_a_bundle_without_clip_or_t5(tmp_path, networks, missing):
    player = Player.from_bundle(tiny_games.write_model(tmp_path, networks=networks), steps=2)
    with pytest.raises(UserError, match=f"this bundle lacks {missing}: convert again") as caught:
        player.start(pictures=[(picture(), TEXT)])
    assert str(tmp_path / "model") in str(caught.value)
    assert "\n" not in str(caught.value)
    player.start(pictures=[None])


def test_networks_that_do_not_fit(bundle):
    config = bundle.config

    def with_sizes(name: str, **sizes: int) -> ModelConfig:
        network = dataclasses.replace(getattr(config, name), **sizes)
        return dataclasses.replace(config, **{name: network})

    for name, sizes, message in (
        ("clip", {"image_size": 24}, "tiny: image tokens: expected 4, as the encoder .* found 9"),
        ("clip", {"vision_width": 24}, "width of image features: expected 20, .* found 24"),
        ("t5", {"d_model": 16}, "width of text features: expected 12, .* found 16"),
    ):
        with pytest.raises(UserError, match=message):
            check_networks(with_sizes(name, **sizes), name="tiny")


def broken(bundle: Bundle, path: Path) -> Bundle:
    """The bundle with a CLIP of numbers that are not finite."""
    with BundleWriter(path, name="broken", protocol=bundle.protocol) as writer:
        for name in ALL:
            arrays = {p: bundle.read(name, p) for p in bundle.leaves(name)}
            if name == "clip":
                arrays = {p: np.full_like(array, np.nan) for p, array in arrays.items()}
            writer.write_network(name, getattr(bundle.config, name), list(arrays.items()))
        writer.write_tokenizer(bundle.tokenizer_dir)
    return Bundle.open(path)


def test_a_picture_that_is_not_finite_is_named(bundle, tmp_path):
    encoder = PictureEncoder(broken(bundle, tmp_path / "broken"))
    with pytest.raises(NonFiniteError, match="hero: E_a of the picture is not finite"):
        encoder.represent(picture(), TEXT, name="hero")
