"""Skipped denoising steps: measured, chosen, stored, and exact where nothing is skipped."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INSTRUCTIONS

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.cli import main
from animegamer_jax.errors import UserError
from animegamer_jax.game import rollout
from animegamer_jax.game.player import Player
from animegamer_jax.game.skipped_steps import (
    MOST_IN_A_ROW,
    Errors,
    SkippedSteps,
    calibrate,
    choose_rows,
    measure_errors,
)

STEPS = 6


@pytest.fixture(scope="module")
def bundle(tiny_bundle) -> Bundle:
    return Bundle.open(tiny_bundle)


@pytest.fixture(scope="module")
def player(bundle) -> Player:
    return Player.from_bundle(bundle, steps=STEPS)


@pytest.fixture(scope="module")
def skipped(player, bundle) -> SkippedSteps:
    return calibrate(player, bundle, INSTRUCTIONS[:1], times_fewer=2.0)


def with_rows(player: Player, found: SkippedSteps, rows: tuple[int, ...]) -> Player:
    """The same networks, playing other rows."""
    found = dataclasses.replace(found, rows=rows)
    return Player(player.networks, player.tokenizer, player.protocol, steps=STEPS, skipped=found)


def frames_of(player: Player) -> np.ndarray:
    _, output = player.play_turn(player.start(), INSTRUCTIONS[:1], seeds=[7], turn=1)
    return output.frames.astype(int)


def test_as_many_evaluations_as_were_asked_for(player, skipped):
    assert skipped.rows[0] == 2
    assert skipped.evaluations <= STEPS
    assert skipped.speedup >= 2
    assert (skipped.steps, skipped.guided) == (STEPS, True)
    assert 0 < skipped.error < 1


def test_every_row_evaluated_is_the_dense_clip(player, skipped):
    """The program that could skip makes the frames of the one that could not."""
    every = with_rows(player, skipped, (2,) * STEPS)
    assert np.abs(frames_of(every) - frames_of(player)).max() <= 1
    assert player.table.rows is None, "without skipped steps nothing of this is compiled"


def test_a_skipped_step_adds_what_was_added_before(player, skipped):
    """Against the same steps taken one by one with the network's own functions."""
    rows = (2, 0, 1, 0, 2, 0)
    fewer = with_rows(player, skipped, rows)
    dit, unconditional = player.networks.dit, player.networks.unconditional
    state = player.predict(player.start(), INSTRUCTIONS[:1])
    keys = rollout.turn_keys(rollout.game_keys([7]), jnp.asarray(1))
    start = rollout.start_clip(dit, keys, rows=2)
    found = jax.jit(lambda *a: rollout.denoise_clip(dit, unconditional, state, *a))
    found = found(start, fewer.table, keys)

    @jax.jit
    def step_by_step(dit, unconditional, state, keys, start):
        context = jnp.stack(
            [unconditional.astype(state.representation.dtype), state.representation[0]]
        )
        x, before, residual = start.x, jnp.zeros_like(start.x), start.residual
        for n, count in enumerate(rows):
            row = player.table.part(n, n + 1)
            time, guidance = jnp.full(2, row.timestep[0]), row.guidance[0]
            modulation = dit.modulation(time, jnp.tile(state.motion_value, 2))
            here = slice(2 - count, 2)
            if count:
                _, added = dit.with_residual(
                    jnp.tile(x, (count, 1, 1, 1, 1)),
                    timestep=time[here],
                    context=context[here],
                    modulation=jax.tree.map(
                        lambda m, first=2 - count: m[..., first:, :], modulation
                    ),
                )
                residual = residual.at[here].set(added)
            both = jnp.tile(x, (2, 1, 1, 1, 1))
            options = {"timestep": time, "context": context, "modulation": modulation}
            v = dit.from_residual(both, residual=residual, **options)
            v = v[1:] if count == 1 else v[:1] + guidance * (v[1:] - v[:1])
            denoised = row.signal[0] * x - row.noise_level[0] * v
            noise = jax.random.normal(jax.random.fold_in(keys[0], n + 1), x.shape[1:])[None]
            x = row.on_x[0] * x + row.on_denoised[0] * denoised
            x = x + row.on_previous[0] * before + row.on_noise[0] * noise
            before = denoised
        return x

    x = step_by_step(dit, unconditional, state, keys, start)
    np.testing.assert_allclose(found.x, x, atol=2e-4)


def test_a_turn_in_parts_is_the_turn_as_one_program(player, skipped):
    fewer = with_rows(player, skipped, skipped.rows)
    whole = jax.jit(
        lambda window, instruction: rollout.play_turn(
            fewer.networks,
            window,
            instruction,
            rollout.game_keys([7]),
            jnp.asarray(1),
            layout=fewer.layout,
            table=fewer.table,
        )
    )
    _, result = whole(fewer.start(), fewer.read(INSTRUCTIONS[:1]))
    assert np.abs(frames_of(fewer) - np.asarray(result.frames, int)).max() <= 1
    assert np.abs(frames_of(fewer) - frames_of(player)).max() > 1, "something was skipped"


def test_errors_of_a_step(player):
    """Measured where they can be; a row more or an older residual is another error."""
    errors = measure_errors(player, INSTRUCTIONS[:1])
    assert errors.reused.shape == (STEPS, MOST_IN_A_ROW)
    known = np.isfinite(errors.reused)
    np.testing.assert_array_equal(known, np.arange(STEPS)[:, None] > np.arange(MOST_IN_A_ROW))
    assert (errors.reused[known] > 0).all()
    assert np.isfinite(errors.one_row).all()


@pytest.mark.parametrize("guided", [True, False])
def test_the_best_of_all_choices(guided):
    """Against all choices, of which none is better."""
    random = np.random.default_rng(0)
    n, full = 7, 1 + guided
    reused = np.cumsum(random.uniform(size=(n, MOST_IN_A_ROW)), axis=1)
    errors = Errors(reused, random.uniform(size=n))
    guidance = np.array([3, 1.2, 5, 1, 1.1, 2, 1.25]) if guided else None
    rows, total = choose_rows(errors, guidance=guidance, most=3 * full)

    def error_of(rows: tuple[int, ...]) -> float:
        error, back = 0.0, 0
        for step, count in enumerate(rows):
            if count < full and step == 0:
                return np.inf
            if count == 0:
                if back == MOST_IN_A_ROW:
                    return np.inf
                error += reused[step, back]
                back += 1
                continue
            back = 0
            if count < full:
                error += errors.one_row[step] if guidance[step] <= 1.25 else np.inf
        return error

    every = itertools.product(range(full + 1), repeat=n)
    best = min(error_of(choice) for choice in every if sum(choice) <= 3 * full)
    assert error_of(rows) == pytest.approx(total) == pytest.approx(best)
    assert sum(rows) <= 3 * full


def test_too_few_evaluations():
    errors = Errors(np.ones((20, MOST_IN_A_ROW)), np.ones(20))
    with pytest.raises(UserError, match="3 evaluations in 20 steps: expected more"):
        choose_rows(errors, guidance=None, most=3)


def test_files(skipped, bundle, tmp_path, capsys):
    """Those of another model, of another number of steps and damaged ones are refused."""
    file = tmp_path / "skip.json"
    skipped.save(file)
    assert SkippedSteps.load(file, bundle) == skipped
    player = Player.from_bundle(bundle, skip=file)
    assert player.steps == STEPS, "the file's"
    with pytest.raises(UserError, match="3 denoising steps: this player skips some of 6"):
        player.play_turn(player.start(), INSTRUCTIONS[:1], seeds=[1], turn=1, steps=3)
    with pytest.raises(UserError, match="steps to skip of 6, found --steps 9: leave --steps out"):
        Player.from_bundle(bundle, skip=file, steps=9)
    dataclasses.replace(skipped, digest="another", model="other").save(file)
    with pytest.raises(UserError, match="with the decoder of other, found another one in"):
        Player.from_bundle(bundle, skip=file)
    for rows in ((1, *skipped.rows[1:]), skipped.rows[1:], (*skipped.rows[:-1], 3)):
        dataclasses.replace(skipped, rows=rows).save(file)
        with pytest.raises(UserError, match="rows: expected 6 numbers from 0 to 2"):
            SkippedSteps.read(file)
    words = ["plan", "--stage", "rollout", "--topology", "v6e:1x1", "--skip", str(file)]
    assert main(words) == 2
    assert "rows: expected 6 numbers" in capsys.readouterr().err


def test_the_command(tiny_bundle, tmp_path, capsys):
    lines, out = tmp_path / "lines.txt", tmp_path / "skip.json"
    lines.write_text(INSTRUCTIONS[0] + "\n")
    words = ["calibrate", "--instructions", str(lines), "--out", str(out), "--steps", "4"]
    assert main([*words, "--model", str(tiny_bundle)]) == 0
    assert "4 evaluations in 4 steps, 2.00 times fewer" in capsys.readouterr().out
    assert SkippedSteps.read(out).steps == 4
    assert main([*words, "--times-fewer", "0.5"]) == 2
    assert "--times-fewer 0.5: expected a number of 1 or more" in capsys.readouterr().err


def test_a_student_skips_nothing(player, bundle):
    protocol = dataclasses.replace(
        player.protocol, guidance_scale=0.0, student_timesteps=(999, 500), denoising_steps=2
    )
    student = Player(player.networks, player.tokenizer, protocol)
    with pytest.raises(UserError, match="was distilled to few steps"):
        calibrate(student, bundle, INSTRUCTIONS[:1], times_fewer=2.0)
