"""A history of what was shown: each clip's first frame goes back into the window."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INSTRUCTIONS, NUM_IMAGE, NUM_TEXT

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.cli import main
from animegamer_jax.data.features import see_frames
from animegamer_jax.errors import UserError
from animegamer_jax.game import rollout
from animegamer_jax.game.loading import check_fit
from animegamer_jax.game.player import Player
from animegamer_jax.game.saved.turns import TurnRecord
from animegamer_jax.game.saved_game import Game
from animegamer_jax.serve.engine.engine import Engine
from animegamer_jax.serve.games.game_store import GameModel, GameStore

STEPS = 4
# Errors of representations, and the share of pixels off by a level: of a first turn, of later ones.
# One level of a first frame's pixel is seen, and moves what is predicted from it.
BOUNDS = ((2e-4, 0.001), (5e-3, 0.01))


@pytest.fixture(scope="module")
def player(shown_bundle) -> Player:
    return Player.from_bundle(Bundle.open(shown_bundle), steps=STEPS)


def play(player: Player, instructions=INSTRUCTIONS, seed: int = 7) -> list:
    window, outputs = player.start(), []
    for turn, text in enumerate(instructions, 1):
        window, output = player.play_turn(window, [text], seeds=[seed], turn=turn)
        outputs.append(output)
    return outputs


@pytest.fixture(scope="module")
def played(player) -> list:
    return play(player)


@pytest.fixture(scope="module")
def predicted(tiny_bundle) -> list:
    """The same game of the same networks, whose history is what the model predicted."""
    return play(Player.from_bundle(Bundle.open(tiny_bundle), steps=STEPS))


def same_frames(a: np.ndarray, b: np.ndarray, *, share: float = 0.001) -> None:
    """Equal but for one level of 255 where float32 sums were taken in another order."""
    difference = np.abs(a.astype(int) - b.astype(int))
    assert difference.max() <= 1
    assert (difference > 0).mean() < share


def records(outputs: list, count: int) -> list[TurnRecord]:
    return [
        TurnRecord(text, output.representation[0], output.states[0])
        for text, output in zip(INSTRUCTIONS[:count], outputs[:count], strict=True)
    ]


def test_the_image_tokens_are_those_of_the_first_frame(player, played):
    """CLIP's features as a feature dataset has them, and E_a as training computes it."""
    shot = player.networks.shot
    encode = jax.jit(lambda encoder, text, image: encoder(text, image))
    nothing = jnp.zeros((1, NUM_TEXT, 12))
    seen = []
    for output in played:
        features = see_frames(shot.clip, jnp.asarray(output.frames[:, 0]))
        seen.append(np.asarray(encode(shot.encoder, nothing, features))[:, NUM_TEXT:])
        np.testing.assert_allclose(output.representation[:, NUM_TEXT:], seen[-1], atol=1e-5)
        last = see_frames(shot.clip, jnp.asarray(output.frames[:, -1]))
        other = np.asarray(encode(shot.encoder, nothing, last))[:, NUM_TEXT:]
        assert np.abs(other - seen[-1]).max() > 1e-2, "another frame is another picture"
    assert seen[0].shape[1] == NUM_IMAGE
    assert np.abs(seen[0] - seen[1]).max() > 1e-2


def test_the_text_tokens_and_the_clip_are_those_of_the_prediction(player, played, predicted):
    """The first turn has no history, so it is the same; of later ones the window predicts."""
    np.testing.assert_array_equal(played[0].frames, predicted[0].frames)
    np.testing.assert_array_equal(played[0].states, predicted[0].states)
    for turn, output in enumerate(played, 1):
        window = player.restore([records(played, turn - 1)])
        state = player._predict(
            player.networks.mllm, window, player.read(INSTRUCTIONS[turn - 1 :][:1])
        )
        expected = np.asarray(state.representation)
        np.testing.assert_array_equal(output.representation[:, :NUM_TEXT], expected[:, :NUM_TEXT])
        assert np.abs(output.representation - expected)[:, NUM_TEXT:].max() > 1e-2
        keys = rollout.turn_keys(rollout.game_keys([7]), jnp.asarray(turn))
        networks, start = player.networks, rollout.start_clip(player.networks.dit, keys)
        sampler = rollout.denoise_clip(
            networks.dit, networks.unconditional, state, start, player.table, keys
        )
        same_frames(np.asarray(player._decode(networks.vae, sampler.x)[0]), output.frames)


def test_later_turns_see_what_was_shown(played, predicted):
    assert np.abs(played[1].representation - predicted[1].representation)[:, :NUM_TEXT].max() > 1e-3
    assert (played[1].frames != predicted[1].frames).any()


def test_either_history_can_be_chosen(shown_bundle, predicted):
    player = Player.from_bundle(Bundle.open(shown_bundle), steps=STEPS, history="predicted")
    assert player.networks.shot is None
    for found, expected in zip(play(player), predicted, strict=True):
        np.testing.assert_array_equal(found.representation, expected.representation)
        np.testing.assert_array_equal(found.frames, expected.frames)


def test_the_scanned_rollout_is_turn_by_turn(player, played):
    read = [player.read([text]) for text in INSTRUCTIONS]
    instructions = jax.tree.map(lambda *x: jnp.stack(x), *read)
    window, results = jax.jit(
        lambda networks, window, instructions, games: rollout.rollout(
            networks, window, instructions, games, layout=player.layout, table=player.table
        )
    )(player.networks, player.start(), instructions, rollout.game_keys([7]))
    for turn, output in enumerate(played):
        np.testing.assert_array_equal(results.state.states[turn], output.states)
        atol, share = BOUNDS[turn > 0]
        np.testing.assert_allclose(results.remembered[turn], output.representation, atol=atol)
        same_frames(np.asarray(results.frames[turn]), output.frames, share=share)
    np.testing.assert_array_equal(window.representations[0], results.remembered[-2:, 0])
    assert np.abs(results.state.representation - results.remembered).max() > 1e-2


def test_a_batch_of_games_is_single_games(player):
    window, batch, seeds = player.start(4), [], (3, 1, 4, 1)
    for turn in (1, 2):
        texts = [INSTRUCTIONS[(game + turn) % 4] for game in range(4)]
        window, output = player.play_turn(window, texts, seeds=seeds, turn=turn)
        batch.append(output)
    for game, seed in enumerate(seeds):
        texts = [INSTRUCTIONS[(game + turn) % 4] for turn in (1, 2)]
        pairs = zip(play(player, texts, seed), batch, strict=True)
        for turn, (single, many) in enumerate(pairs):
            atol, share = BOUNDS[turn > 0]
            np.testing.assert_array_equal(single.states[0], many.states[game])
            np.testing.assert_allclose(
                single.representation[0], many.representation[game], atol=atol
            )
            same_frames(single.frames[0], many.frames[game], share=share)


def test_the_window_of_a_saved_game_is_the_played_one(player, played):
    window = player.start()
    for turn, text in enumerate(INSTRUCTIONS, 1):
        window, _ = player.play_turn(window, [text], seeds=[7], turn=turn)
    jax.tree.map(np.testing.assert_array_equal, player.restore([records(played, 4)]), window)


def test_resumed_on_the_command_line_is_uninterrupted(shown_bundle, tmp_path, capsys):
    lines, whole, parts = tmp_path / "lines.txt", tmp_path / "whole", tmp_path / "parts"

    def run(out, count: int, *options: str) -> int:
        lines.write_text("\n".join(INSTRUCTIONS[:count]))
        words = ["--model", str(shown_bundle), "--instructions", str(lines)]
        return main(["play", *words, "--steps", str(STEPS), "--out", str(out), *options])

    assert run(whole, 4) == run(parts, 2) == run(parts, 4, "--resume") == 0
    for name in [f"turn_{turn:03d}" for turn in range(1, 5)]:
        a, b = (np.load(out / f"{name}.npz")["representation"] for out in (whole, parts))
        np.testing.assert_array_equal(a, b)
        clips = [(out / f"{name}.mp4").read_bytes() for out in (whole, parts)]
        assert clips[0] == clips[1]
    assert json.loads((whole / "game.json").read_text())["history"] == "shown"
    assert Game.load(parts).history_kind == "shown"
    capsys.readouterr()
    assert run(parts, 4, "--resume", "--history", "predicted") == 2
    assert "history: expected 'predicted', as given, found 'shown'" in capsys.readouterr().err


def test_a_game_goes_on_with_the_history_that_it_began_with(tiny_bundle, shown_bundle, tmp_path):
    """An earlier game: its file does not say what its history is, because there was one kind."""
    lines, out = tmp_path / "lines.txt", tmp_path / "game"
    words = ["play", "--model", str(shown_bundle), "--instructions", str(lines), "--out", str(out)]
    lines.write_text("\n".join(INSTRUCTIONS[:2]))
    assert main([*words, "--steps", str(STEPS), "--history", "predicted"]) == 0
    assert "history" not in json.loads((out / "game.json").read_text())
    lines.write_text("\n".join(INSTRUCTIONS[:3]))
    assert main([*words, "--resume"]) == 0
    model = Player.from_bundle(Bundle.open(tiny_bundle), steps=STEPS)
    expected = play(model, INSTRUCTIONS[:3], seed=0)
    for turn, output in enumerate(expected, 1):
        found = np.load(out / f"turn_{turn:03d}.npz")["representation"]
        np.testing.assert_array_equal(found, output.representation[0])


def test_games_on_a_server_undone_and_branched(player, tmp_path):
    """They go on as the game in one piece: the frames shown stand in the files of its turns."""
    model = GameModel(
        name="tiny",
        protocol="paper",
        representation=(NUM_TEXT + NUM_IMAGE, 32),
        clip=(240, 360, player.num_frames),
        history=player.protocol.history,
    )
    store = GameStore(tmp_path / "games", model=model)
    engine = Engine(player, store, batch_sizes=(1,))

    def submit(game: str, turn: int) -> np.ndarray:
        request = engine.submit(game, INSTRUCTIONS[turn - 1])
        assert request.wait(120.0)
        assert request.turn is not None, request.error
        file = store.folder / game / request.turn.representation_file
        return np.load(file)["representation"]

    try:
        game = store.new(seed=7, window=3, steps=STEPS)
        first = [submit(game, turn) for turn in (1, 2, 3)]
        branch = store.branch(game, 2)
        np.testing.assert_array_equal(submit(branch, 3), first[2])
        assert Game.load(store.folder / branch).history_kind == "shown"
        store.get(game).set_aside()
        np.testing.assert_array_equal(submit(game, 3), first[2])
    finally:
        engine.close()
    for found, output in zip(first, play(player, INSTRUCTIONS[:3]), strict=True):
        np.testing.assert_array_equal(found, output.representation[0])
    other = GameStore(store.folder, model=model._replace(history="predicted"))
    with pytest.raises(
        UserError, match="history: expected 'predicted', as on this server, found 'shown'"
    ):
        other.get(game)


def test_a_model_that_cannot_see_is_named(tiny_bundle, shown_bundle, tmp_path, capsys):
    without = Bundle.open(tiny_bundle)
    with pytest.raises(UserError, match="history shown without clip: use a model with CLIP"):
        Player.from_bundle(without, history="shown")
    words = ["play", "--model", str(tiny_bundle), "--instructions", str(tmp_path / "lines.txt")]
    (tmp_path / "lines.txt").write_text("wave")
    assert main([*words, "--out", str(tmp_path / "game"), "--history", "shown"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("animegamer play: cannot play with history shown without clip")
    assert printed.count("\n") == 1
    config = Bundle.open(shown_bundle).config
    blind = dataclasses.replace(config, encoder=None)
    with pytest.raises(UserError, match="cannot play without encoder"):
        check_fit(blind, history="shown")
    assert config.clip is not None
    coarse = dataclasses.replace(config, clip=dataclasses.replace(config.clip, patch_size=6))
    with pytest.raises(UserError, match="image tokens: encoder 9, clip 4"):
        check_fit(coarse, history="shown")
    check_fit(coarse)
    networks = Player.from_bundle(without, steps=1).networks
    protocol = dataclasses.replace(without.protocol, history="shown")
    with pytest.raises(UserError, match="history shown without clip and encoder"):
        Player(networks, Player.from_bundle(without, steps=1).tokenizer, protocol)
