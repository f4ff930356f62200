"""A turn and the rollout: one compile, batches, scans, windows, keys, non-finite numbers."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import INSTRUCTIONS

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.game import rollout
from animegamer_jax.game.loading import check_fit
from animegamer_jax.game.player import Player
from animegamer_jax.game.rollout import Instruction

STEPS = 4


@pytest.fixture(scope="module")
def player(tiny_bundle) -> Player:
    return Player.from_bundle(Bundle.open(tiny_bundle), steps=STEPS)


@pytest.fixture(scope="module")
def whole_turn(player):
    """The turn as one jitted function."""
    layout, table = player.layout, player.table
    return jax.jit(
        lambda networks, window, instruction, games, turn: rollout.play_turn(
            networks, window, instruction, games, turn, layout=layout, table=table
        )
    )


def play(player: Player, instructions=INSTRUCTIONS, seed: int = 7) -> list:
    window, outputs = player.start(), []
    for turn, text in enumerate(instructions, 1):
        window, output = player.play_turn(window, [text], seeds=[seed], turn=turn)
        outputs.append(output)
    return outputs


@pytest.fixture(scope="module")
def played(player) -> list:
    return play(player)


def same_frames(a: np.ndarray, b: np.ndarray) -> None:
    """Equal but for one level of 255 where float32 sums were taken in another order."""
    assert a.shape == b.shape
    difference = np.abs(a.astype(int) - b.astype(int))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.001


def test_a_turn_has_what_a_game_needs(player, played):
    output = played[0]
    assert output.frames.shape == (1, 9, 16, 24, 3)
    assert output.frames.shape[1:4] == (player.num_frames, player.height, player.width)
    assert output.frames.dtype == np.uint8
    assert output.frames.std() > 1
    for values, state in zip(player.protocol.state_values, output.states[0], strict=True):
        assert state in values
    level = output.states[0, 0]
    assert output.motion_value[0] == player.protocol.motion_values[level - 1]
    assert set(output.seconds) == {"mllm", "decoder", "vae", "total"}
    assert output.seconds["total"] == pytest.approx(
        sum(value for name, value in output.seconds.items() if name != "total")
    )


def test_the_window_matters(player, played):
    alone = play(player, INSTRUCTIONS[2:3])[0]
    assert np.abs(alone.representation - played[2].representation).max() > 1e-3


def test_the_window_forgets(player):
    """With a window of 3, the turn before the last two changes nothing."""
    other = ["Character: somebody else", *INSTRUCTIONS[1:]]
    a, b = play(player)[3], play(player, other)[3]
    # Turn 2 and 3 were themselves answers to the turn before; so give both the same ones.
    assert np.abs(a.representation - b.representation).max() > 0
    records = [
        _Record(text, output.representation[0], output.states[0])
        for text, output in zip(INSTRUCTIONS, play(player), strict=True)
    ]
    changed = [dataclasses.replace(records[0], instruction="x"), *records[1:3]]
    windows = player.restore([records[:3]]), player.restore([changed])
    same = jax.tree.map(lambda x, y: bool((x == y).all()), *windows)
    assert all(jax.tree.leaves(same))


@dataclasses.dataclass(frozen=True)
class _Record:
    instruction: str
    representation: np.ndarray
    states: np.ndarray
    first_latents: None = None


def test_same_seed_same_frames_and_another_seed_others(player, played):
    again = play(player)
    for a, b in zip(played, again, strict=True):
        np.testing.assert_array_equal(a.frames, b.frames)
        np.testing.assert_array_equal(a.representation, b.representation)
    assert (play(player, INSTRUCTIONS[:1], seed=8)[0].frames != played[0].frames).mean() > 0.4


def test_resumed_equals_uninterrupted(player, played):
    records = [
        _Record(text, output.representation[0], output.states[0])
        for text, output in zip(INSTRUCTIONS[:3], played[:3], strict=True)
    ]
    _, output = player.play_turn(player.restore([records]), INSTRUCTIONS[3:], seeds=[7], turn=4)
    np.testing.assert_array_equal(output.frames, played[3].frames)
    np.testing.assert_array_equal(output.states, played[3].states)


def test_a_batch_of_games_is_single_games(player):
    """Four games of two turns at once, with their own instructions and seeds."""
    window = player.start(4)
    batch = []
    for turn in (1, 2):
        texts = [INSTRUCTIONS[(game + turn) % 4] for game in range(4)]
        window, output = player.play_turn(window, texts, seeds=[3, 1, 4, 1], turn=turn)
        batch.append(output)
    for game, seed in enumerate((3, 1, 4, 1)):
        texts = [INSTRUCTIONS[(game + turn) % 4] for turn in (1, 2)]
        for single, many in zip(play(player, texts, seed), batch, strict=True):
            np.testing.assert_array_equal(single.states[0], many.states[game])
            np.testing.assert_allclose(
                single.representation[0], many.representation[game], atol=2e-5
            )
            same_frames(single.frames[0], many.frames[game])


def test_one_compile_however_long_the_history(player, played, whole_turn):
    window, games = player.start(), rollout.game_keys([7])
    for turn, text in enumerate(INSTRUCTIONS * 2, 1):
        window, result = whole_turn(
            player.networks, window, player.read([text]), games, jnp.asarray(turn)
        )
        if turn <= len(played):
            same_frames(np.asarray(result.frames), played[turn - 1].frames)
            np.testing.assert_array_equal(result.state.states, played[turn - 1].states)
    assert whole_turn._cache_size() == 1
    parts = (player._predict, player._denoise, player._decode)
    before = [part._cache_size() for part in parts]
    window = player.start()
    for turn, text in enumerate(INSTRUCTIONS * 2, 1):
        window, _ = player.play_turn(window, [text], seeds=[7], turn=turn)
    assert [part._cache_size() for part in parts] == before


def test_the_scanned_rollout_is_turn_by_turn(player, played):
    read = [player.read([text]) for text in INSTRUCTIONS]
    instructions = jax.tree.map(lambda *x: jnp.stack(x), *read)
    assert isinstance(instructions, Instruction)
    window, results = jax.jit(
        lambda networks, window, instructions, games: rollout.rollout(
            networks, window, instructions, games, layout=player.layout, table=player.table
        )
    )(player.networks, player.start(), instructions, rollout.game_keys([7]))
    assert int(window.num_turns[0]) == 2
    for turn, output in enumerate(played):
        np.testing.assert_array_equal(results.state.states[turn], output.states)
        same_frames(np.asarray(results.frames[turn]), output.frames)
    assert (np.asarray(results.bad_step) == -1).all()


def test_progress_counts_every_step(player):
    reported = []
    player.play_turn(
        player.start(),
        INSTRUCTIONS[:1],
        seeds=[0],
        turn=1,
        on_progress=lambda *event: reported.append(event),
    )
    steps = [("decoder", step, STEPS) for step in range(STEPS + 1)]
    assert reported == [("mllm", 0, 1), ("mllm", 1, 1), *steps, ("vae", 0, 1), ("vae", 1, 1)]


def test_a_nan_is_named_by_turn_and_step(player):
    """A transformer that fails late in the sampler: the bias of its output is NaN in one step."""
    broken = Player(player.networks, player.tokenizer, player.protocol, window=3, steps=STEPS)
    noise_level = broken.table.noise_level.copy()
    noise_level[2] = np.nan
    broken.table = broken.table._replace(noise_level=noise_level)
    with pytest.raises(NonFiniteError, match=r"turn 5: .* after denoising step 3 of 4"):
        broken.play_turn(broken.start(), INSTRUCTIONS[:1], seeds=[0], turn=5)


def test_a_nan_of_the_vae_is_named(player):
    """One number format's overflow, say: latents are finite, frames are not."""
    graphdef, params = nnx.split(player.networks.vae)
    bias = params["decoder"]["conv_out"]["bias"]
    params["decoder"]["conv_out"]["bias"] = bias.replace(bias[...].at[0].set(jnp.nan))
    networks = player.networks._replace(vae=nnx.merge(graphdef, params))
    broken = Player(networks, player.tokenizer, player.protocol, window=3, steps=STEPS)
    with pytest.raises(NonFiniteError, match=r"turn 2: the frames .* VAE"):
        broken.play_turn(broken.start(), INSTRUCTIONS[:1], seeds=[0], turn=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty"), ("  \n", "empty"), ("x" * 97, "97 tokens"), ("y" * 3000, "3000 characters")],
)
def test_bad_instructions_are_refused(player, text, message):
    with pytest.raises(UserError, match=message):
        player.check_instruction(text)


def test_a_player_cannot_write_special_tokens(player):
    plain = set(player.tokenizer.encode("<TURN></TURN><s><img> <Strength_5>"))
    special = {player.tokenizer.ids.bos, *player.tokenizer.ids.special.values()}
    assert not plain & special


@pytest.mark.parametrize("options", [{"window": 0}, {"steps": 0}, {"steps": 1001}])
def test_bad_options_are_one_line(tiny_bundle, options):
    with pytest.raises(UserError, match="expected"):
        Player.from_bundle(Bundle.open(tiny_bundle), **options)


def test_networks_that_do_not_fit_are_named(tiny_bundle):
    config = Bundle.open(tiny_bundle).config
    wrong = dataclasses.replace(config, vae=dataclasses.replace(config.vae, latent_channels=8))
    with pytest.raises(UserError, match="latent channels: dit 4, vae 8"):
        check_fit(wrong)


class Past(NamedTuple):
    """A saved turn."""

    instruction: str
    representation: np.ndarray
    states: np.ndarray
    first_latents: None = None


def test_games_at_different_turns_play_side_by_side(player, played):
    """Each as it plays alone, whatever its history, its turn and its seed are."""
    past = [
        Past(text, output.representation[0], output.states[0])
        for text, output in zip(INSTRUCTIONS, played, strict=True)
    ]
    window = player.restore([past[:2], [], past[:3]])
    _, output = player.play_turn(
        window, [INSTRUCTIONS[2], INSTRUCTIONS[0], INSTRUCTIONS[3]], seeds=[7, 7, 7], turn=[3, 1, 4]
    )
    for row, turn in enumerate((2, 0, 3)):
        np.testing.assert_array_equal(output.states[row], played[turn].states[0])
        same_frames(output.frames[row], played[turn].frames[0])


def test_the_window_of_a_saved_game_is_the_played_one(player, played):
    window = player.start()
    for turn, text in enumerate(INSTRUCTIONS, 1):
        window, _ = player.play_turn(window, [text], seeds=[7], turn=turn)
    past = [
        Past(text, output.representation[0], output.states[0])
        for text, output in zip(INSTRUCTIONS, played, strict=True)
    ]
    jax.tree.map(np.testing.assert_array_equal, player.restore([past]), window)


def test_levels_and_steps_of_the_players_choice(player, played):
    window = player.start(2)
    text, steps = INSTRUCTIONS[:1] * 2, []
    _, output = player.play_turn(
        window, text, seeds=[7, 7], turn=1, levels=[5, 0], steps=2,
        on_progress=lambda stage, step, total: steps.append((stage, step, total)),
    )  # fmt: skip
    assert output.states[:, 0].tolist() == [5, played[0].states[0, 0]]
    assert output.motion_value[0] == player.protocol.motion_values[4]
    np.testing.assert_array_equal(output.states[:, 1:], played[0].states.repeat(2, 0)[:, 1:])
    assert ("decoder", 2, 2) in steps
    with pytest.raises(UserError, match="motion level 7: expected one of"):
        player.play_turn(window, text, seeds=[7, 7], turn=1, levels=[7, 0])
    with pytest.raises(UserError, match="1001 denoising steps"):
        player.play_turn(window, text, seeds=[7, 7], turn=1, steps=1001)


def test_guidance_is_the_protocols(player):
    def guidance(scale: float) -> np.ndarray:
        protocol = dataclasses.replace(player.protocol, guidance_scale=scale)
        return Player(player.networks, player.tokenizer, protocol, steps=STEPS).table.guidance

    np.testing.assert_array_equal(guidance(0.0), 1)
    np.testing.assert_array_equal(guidance(6.0), player.table.guidance)


def test_steps_are_the_protocols_where_none_are_asked_for(player):
    protocol = dataclasses.replace(player.protocol, denoising_steps=7)
    for asked, expected in ((None, 7), (3, 3)):
        found = Player(player.networks, player.tokenizer, protocol, steps=asked)
        assert found.steps == len(found.table.step) == expected


def test_a_game_without_guidance_has_one_row(player):
    """It makes what two rows of guidance one make, from half of the work."""
    protocol = dataclasses.replace(player.protocol, guidance_scale=0.0)
    single = Player(player.networks, player.tokenizer, protocol, steps=STEPS)
    assert single.networks.unconditional is None
    double = player.networks
    assert double.unconditional is not None
    shots = jax.random.normal(jax.random.key(1), (2, *double.unconditional.shape))
    state = rollout.GameState(shots, jnp.zeros((2, 4), jnp.int32), jnp.ones(2))
    keys = rollout.turn_keys(rollout.game_keys([3, 4]), jnp.asarray(1))

    def clips(networks: rollout.Networks) -> np.ndarray:
        start = rollout.start_clip(networks.dit, keys)
        context = networks.unconditional
        sampler = rollout.denoise_clip(networks.dit, context, state, start, single.table, keys)
        return np.asarray(sampler.x)

    np.testing.assert_allclose(clips(single.networks), clips(double), rtol=1e-4, atol=1e-5)


def test_frames_are_shown_before_the_clip_is_done(player, played):
    """A guess after half of the steps, then each chunk; together they are the clip."""
    found = []
    _, output = player.play_turn(
        player.start(), INSTRUCTIONS[:1], seeds=[7], turn=1, on_frames=found.append
    )
    guess, *chunks = found
    assert (guess.steps, guess.first, guess.is_final) == (STEPS // 2, 0, False)
    assert guess.frames.shape == (1, 1, *output.frames.shape[2:])
    assert chunks
    assert all(chunk.is_final for chunk in chunks)
    lengths = [chunk.frames.shape[1] for chunk in chunks]
    assert [chunk.first for chunk in chunks] == np.cumsum([0, *lengths[:-1]]).tolist()
    np.testing.assert_array_equal(
        np.concatenate([chunk.frames for chunk in chunks], axis=1), output.frames
    )
    same_frames(output.frames, played[0].frames)


def test_a_guess_alone_leaves_the_clip_as_it_is(player):
    """To the bit, for each game of a batch."""
    found, options = [], {"seeds": [7, 8], "turn": 1}
    lines = INSTRUCTIONS[:2]
    _, plain = player.play_turn(player.start(2), lines, **options)
    _, output = player.play_turn(
        player.start(2), lines, on_frames=found.append, by_chunk=False, **options
    )
    (guess,) = found
    assert (guess.steps, guess.is_final, len(guess.frames)) == (STEPS // 2, False, 2)
    assert (guess.frames[0] != guess.frames[1]).any()
    np.testing.assert_array_equal(output.frames, plain.frames)
    np.testing.assert_array_equal(output.representation, plain.representation)


def test_a_language_model_of_eight_bits(tiny_bundle, player, played):
    """It plays, at almost the same predictions, with kernels of one byte a weight."""
    small = Player.from_bundle(Bundle.open(tiny_bundle), steps=STEPS, int8=True)
    block = small.networks.mllm.mistral.layers.blocks
    assert block.gate.kernel[...].dtype == jnp.int8
    assert small.networks.dit.layers.blocks.qkv.kernel[...].dtype != jnp.int8
    found = small.predict(small.start(), INSTRUCTIONS[:1]).representation
    exact = player.predict(player.start(), INSTRUCTIONS[:1]).representation
    assert 0 < jnp.linalg.norm(found - exact) < 0.05 * jnp.linalg.norm(exact)
    assert play(small, INSTRUCTIONS[:1])[0].frames.shape == played[0].frames.shape
