"""A picture comes first: the clip is made of what E_a sees in a picture of the prediction."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INSTRUCTIONS, NUM_TEXT, make_bundle, write_model

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.game import rollout, skipped_steps
from animegamer_jax.game.loading import check_fit
from animegamer_jax.game.player import Player
from animegamer_jax.game.saved.turns import TurnRecord
from animegamer_jax.models.encoder import encode_frames
from animegamer_jax.toy.scoring.decoder_samples import sample_shots

STEPS = 3


@pytest.fixture(scope="module")
def pictured_bundle(tmp_path_factory, shown_bundle) -> Path:
    protocol = dataclasses.replace(
        Bundle.open(shown_bundle).protocol,
        picture_first=True,
        guidance_scale=1.5,
        guidance_schedule="constant",
        motion_guidance=3.0,
    )
    return make_bundle(tmp_path_factory.mktemp("bundles") / "pictured", protocol)


@pytest.fixture(scope="module")
def player(pictured_bundle) -> Player:
    return Player.from_bundle(Bundle.open(pictured_bundle), steps=STEPS)


def play(player: Player, count: int = 2, **options) -> list:
    window, outputs = player.start(), []
    for turn, text in enumerate(INSTRUCTIONS[:count], 1):
        window, output = player.play_turn(window, [text], seeds=[7], turn=turn, **options)
        outputs.append(output)
    return outputs


@pytest.fixture(scope="module")
def played(player) -> list:
    return play(player)


def roll_out(player: Player) -> tuple[rollout.Window, rollout.TurnResult]:
    """Scans the first two instructions as one program."""
    read = [player.read([text]) for text in INSTRUCTIONS[:2]]
    instructions = jax.tree.map(lambda *x: jnp.stack(x), *read)
    return jax.jit(
        lambda networks, window, instructions, games: rollout.rollout(
            networks, window, instructions, games, layout=player.layout, table=player.table
        )
    )(player.networks, player.start(), instructions, rollout.game_keys([7]))


def same_frames(a: np.ndarray, b: np.ndarray, *, share: float = 0.001) -> None:
    difference = np.abs(a.astype(int) - b.astype(int))
    assert difference.max() <= 1
    assert (difference > 0).mean() < share


def test_a_turn_in_steps_taken_one_by_one(player, played):
    """The picture by guidance from noise of its own; the clip of its tokens, its motion guided.

    The clip's first latent frame is the picture's, free of noise, at every step.
    """
    networks, c = player.networks, player.networks.dit.config
    state = player.predict(player.start(), INSTRUCTIONS[:1])
    keys = rollout.turn_keys(rollout.game_keys([7]), jnp.asarray(1))
    own = jax.vmap(jax.random.fold_in, (0, None))(keys, 1 << 20)
    table = diffusion.make_sampler_table(diffusion.schedule_of(player.protocol), STEPS)

    @functools.partial(jax.jit, static_argnames=("frames", "scale"))
    def sample(networks, state, context, keys, frames, scale, first=None):
        shape = (frames, c.latent_height, c.latent_width, c.latent_channels)

        def noise(step):
            key = jax.random.fold_in(keys[0], jnp.asarray(step) + 1)
            return jax.random.normal(key, shape)[None]

        def predict_v(x, timestep, guidance):
            options = {"timestep": jnp.full(1, timestep)}
            if first is not None:
                assert not networks.vae.config.frequency_scales
                raw, x = x, x.at[:, :1].set(first)
            motion, still = state.motion_value, jnp.full(1, player.protocol.motion_values[0])
            v = networks.dit(x, context=context, motion=motion, **options)
            if scale is None:
                without = networks.dit(x, context=context, motion=still, **options)
                v = jnp.where(timestep >= 500, 4 * v - 3 * without, v)
                row = jnp.argmax(jnp.asarray(table.timestep) == timestep)
                s, n = jnp.asarray(table.signal)[row], jnp.asarray(table.noise_level)[row]
                denoised = (s * x - n * v).at[:, :1].set(first)
                return (s * raw - denoised) / n
            empty = networks.unconditional[None]
            without = networks.dit(x, context=empty, motion=motion, **options)
            return without + scale * (v - without)

        start = diffusion.start_sampler(noise(-1))
        return diffusion.sample(predict_v, start, table, noise=noise).x

    @jax.jit
    def see(networks, drawn):
        picture = rollout.decode_picture(networks.vae, drawn)
        return encode_frames(networks.shot, picture[:, 0])

    drawn = sample(networks, state, state.representation, own, c.patch_frames, 2.5)
    seen = see(networks, drawn)
    context = np.concatenate([state.representation[:, :NUM_TEXT], seen], axis=1)
    latents = sample(networks, state, context, keys, c.latent_frames, None, drawn[:, :1])
    clip, _ = jax.jit(rollout.decode_clip)(networks.vae, latents)
    same_frames(np.asarray(clip), played[0].frames)
    np.testing.assert_allclose(latents[:, :1], drawn[:, :1], atol=1e-5)
    np.testing.assert_allclose(played[0].representation, context, atol=2e-4)
    assert np.abs(seen - state.representation[:, NUM_TEXT:]).max() > 1e-2


def test_the_rollout_is_turn_by_turn(player, played):
    window, results = roll_out(player)
    for turn, output in enumerate(played):
        np.testing.assert_array_equal(results.state.states[turn], output.states)
        atol, share = ((2e-4, 0.001), (5e-3, 0.01))[turn]
        np.testing.assert_allclose(results.remembered[turn], output.representation, atol=atol)
        same_frames(np.asarray(results.frames[turn]), output.frames, share=share)
    np.testing.assert_array_equal(window.representations[0], results.remembered[-2:, 0])


@pytest.mark.parametrize("name", ["dit", "picture"])
def test_a_decoder_that_remembers_looks_at_past_pictures(name, pictured_bundle, tmp_path):
    """In the rollout as turn by turn and as saved and restored; the clip itself has no memory."""
    bundle = Bundle.open(pictured_bundle)
    remembering = dataclasses.replace(bundle.config.dit, memory=2)
    config = dataclasses.replace(bundle.config, **{name: remembering})
    path = write_model(tmp_path / "remembers", config, bundle.protocol, name="tiny")
    player = Player.from_bundle(Bundle.open(path), steps=STEPS)
    window, first = player.play_turn(player.start(), INSTRUCTIONS[:1], seeds=[7], turn=1)
    previews: list = []
    shown = {"on_frames": previews.append, "by_chunk": False}
    _, second = player.play_turn(window, INSTRUCTIONS[1:2], seeds=[7], turn=2, **shown)

    _, results = roll_out(player)
    same_frames(np.asarray(results.frames[0]), first.frames)
    same_frames(np.asarray(results.frames[1]), second.frames, share=0.01)

    saved = first.row(0)
    record = TurnRecord(INSTRUCTIONS[0], saved.representation, saved.states, saved.first_latents)
    restored = player.restore([[record]])
    np.testing.assert_array_equal(restored.first_latents, window.first_latents)
    assert not np.asarray(window.first_latents[:, 0]).any()
    np.testing.assert_allclose(results.first_latents[0], first.first_latents, atol=2e-4)
    with pytest.raises(UserError, match=r"latents of its first frame of shape .* found none"):
        player.restore([[record._replace(first_latents=None)]])

    state = player.predict(window, INSTRUCTIONS[1:2])
    keys = rollout.turn_keys(rollout.game_keys([7]), jnp.asarray(2))
    draw = jax.jit(lambda *a: rollout.draw_picture(player.networks, a[0], player.table, a[1]))
    frames = []
    for past in (window, window._replace(first_latents=window.first_latents.at[:, -1].set(1.0))):
        shown = rollout.with_memory(state, past, player.networks.first_dit.config)
        drawn = draw(shown, keys)
        assert drawn.state.memory is None
        frames.append(np.asarray(drawn.frame[:, 0]))
    same_frames(frames[0], previews[0].frames[:, 0])
    assert np.abs(frames[1].astype(int) - frames[0]).max() > 1
    if name == "picture":
        assert not player.networks.dit.config.memory
        alone = player.networks._replace(picture=None)
        other = rollout.draw_picture(alone, state, player.table, keys).frame[:, 0]
        assert np.abs(np.asarray(other).astype(int) - frames[0]).max() > 1
        mesh = Player.from_bundle(Bundle.open(path), steps=STEPS, layout="latency", num_games=1)
        _, output = mesh.play_turn(mesh.start(), INSTRUCTIONS[:1], seeds=[7], turn=1)
        same_frames(output.frames, first.frames, share=0.01)


def test_a_predicted_history_remembers_the_prediction(pictured_bundle, played):
    player = Player.from_bundle(Bundle.open(pictured_bundle), steps=STEPS, history="predicted")
    output = play(player, 1)[0]
    np.testing.assert_array_equal(output.frames, played[0].frames)
    expected = player.predict(player.start(), INSTRUCTIONS[:1]).representation
    np.testing.assert_array_equal(output.representation, expected)


def test_the_picture_is_shown_first(player, played):
    """Before the first step of the clip, and once."""
    seen, steps = [], []
    output = play(
        player,
        1,
        on_frames=lambda preview: seen.append((preview, len(steps))),
        on_progress=lambda part, step, total: steps.append((part, step)),
        by_chunk=False,
    )[0]
    ((preview, after),) = seen
    assert (preview.first, preview.steps, preview.is_final) == (0, 0, False)
    assert steps[after - 1] == ("decoder", 0)
    encoded = encode_frames(player.networks.shot, jnp.asarray(preview.frames[:, 0]))
    np.testing.assert_allclose(output.representation[:, NUM_TEXT:], encoded, atol=2e-4)
    np.testing.assert_array_equal(output.frames, played[0].frames)


def test_skipped_steps_are_those_of_the_clip(pictured_bundle, player):
    """Without guidance of motion a step needs one row; the picture skips none."""
    bundle = Bundle.open(pictured_bundle)
    assert skipped_steps.count_evaluations(player) == 2 + 2 + 1
    fewer = skipped_steps.calibrate(player, bundle, INSTRUCTIONS[:1], times_fewer=1.6)
    assert fewer.guided
    assert fewer.evaluations <= 3
    assert fewer.speedup == 5 / fewer.evaluations
    assert 0 in fewer.rows
    found = skipped_steps.calibrate(player, bundle, INSTRUCTIONS[:1], times_fewer=1.0)
    assert found.rows == (2, 2, 1), "one row leaves nothing out"
    assert found.error < 1e-5
    kept = player.table
    assert [len(part.step) for part in kept.parts()] == [2, 1]
    try:
        player.table = found.apply(kept, guided=True)
        window = player.start()
        _, output = player.play_turn(window, INSTRUCTIONS[:1], seeds=[7], turn=1)
    finally:
        player.table = kept
    same_frames(output.frames, play(player, 1)[0].frames)


def test_the_decoder_alone_draws_it_too(pictured_bundle, player, played):
    bundle = Bundle.open(pictured_bundle)
    state = player.predict(player.start(), INSTRUCTIONS[:1])
    options = {
        "representations": np.asarray(state.representation)[None],
        "levels": played[0].states[None, :, 0],
        "seeds": [7],
        "steps": STEPS,
    }
    same_frames(sample_shots(bundle, predicted=True, **options)[0], played[0].frames)
    without = sample_shots(bundle, **options)[0]
    assert np.abs(without.astype(int) - played[0].frames).max() > 1


def test_on_a_mesh(pictured_bundle, played):
    for layout in ("latency", "throughput"):
        player = Player.from_bundle(
            Bundle.open(pictured_bundle), steps=STEPS, layout=layout, num_games=1
        )
        _, output = player.play_turn(player.start(), INSTRUCTIONS[:1], seeds=[7], turn=1)
        same_frames(output.frames, played[0].frames, share=0.01)
        np.testing.assert_allclose(output.representation, played[0].representation, atol=5e-3)


def test_without_a_picture_the_clip_remembers(shown_bundle, tmp_path):
    """The same on a mesh, whose turn is one program; with more of a memory than of a window."""
    bundle = Bundle.open(shown_bundle)
    dit = dataclasses.replace(bundle.config.dit, memory=2)
    config = dataclasses.replace(bundle.config, dit=dit)
    protocol = dataclasses.replace(bundle.protocol, guidance_scale=1.5)
    path = write_model(tmp_path / "remembers", config, protocol, name="tiny")

    def play_two(**options):
        player = Player.from_bundle(Bundle.open(path), steps=2, window=2, **options)
        window, first = player.play_turn(player.start(), INSTRUCTIONS[:1], seeds=[7], turn=1)
        assert window.first_latents.shape[1] == 1
        np.testing.assert_array_equal(window.first_latents[:, 0], first.first_latents)
        forgotten = window._replace(first_latents=0 * window.first_latents)
        _, second = player.play_turn(window, INSTRUCTIONS[1:2], seeds=[7], turn=2)
        if not options:
            _, other = player.play_turn(forgotten, INSTRUCTIONS[1:2], seeds=[7], turn=2)
            assert np.abs(other.frames.astype(int) - second.frames).max() > 1
        return first, second

    for one, on_mesh in zip(play_two(), play_two(layout="latency", num_games=1), strict=True):
        same_frames(on_mesh.frames, one.frames, share=0.01)
        np.testing.assert_allclose(on_mesh.first_latents, one.first_latents, atol=5e-3)


def test_what_is_refused(pictured_bundle, player):
    config = Bundle.open(pictured_bundle).config
    with pytest.raises(UserError, match="without clip: this model draws a picture first"):
        check_fit(dataclasses.replace(config, clip=None), picture_first=True)
    drawing = dataclasses.replace(config, picture=config.dit)
    check_fit(drawing, picture_first=True)
    with pytest.raises(UserError, match="picture: a decoder of pictures, and a protocol without"):
        check_fit(drawing)
    small = dataclasses.replace(config.dit, latent_height=2 * config.dit.latent_height)
    with pytest.raises(UserError, match=r"latent height: dit \d+, picture \d+"):
        check_fit(dataclasses.replace(config, picture=small), picture_first=True)
    networks = player.networks._replace(shot=None)
    with pytest.raises(UserError, match="a picture first without clip and encoder"):
        Player(networks, player.tokenizer, player.protocol)


def test_a_picture_that_is_not_finite_is_named(player):
    networks = player.networks._replace(unconditional=player.networks.unconditional * jnp.nan)
    broken = Player(networks, player.tokenizer, player.protocol, steps=STEPS)
    with pytest.raises(NonFiniteError, match="turn 1: the picture that comes first is not finite"):
        play(broken, 1)
    turn = functools.partial(rollout.play_turn, layout=broken.layout, table=broken.table)
    read = broken.read(INSTRUCTIONS[:1])
    games = rollout.game_keys([7])
    _, result = jax.jit(turn)(networks, broken.start(), read, games, jnp.asarray(1))
    assert result.bad_step.tolist() == [STEPS + 1]


def test_motion_guidance_is_of_clips_of_a_picture(shown_bundle, tmp_path):
    shutil.copytree(shown_bundle, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    content = json.loads(file.read_text())
    content["protocol"]["motion_guidance"] = 3.0
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="protocol: motion_guidance is of clips") as caught:
        Bundle.open(tmp_path / "model")
    assert "representation_shift" not in str(caught.value)
