"""The text-only baseline: its games are those that the captions ask for."""

import baseline
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from tiny_games import write_model

from animegamer_jax.bundle.arrays import write_arrays
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import write_benchmark
from animegamer_jax.game.saved_game import Game
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.toy.evaluation import WORLD


def test_games_are_saved_as_an_evaluation_reads_them(tiny_bundle, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(tiny_bundle)
    asked = WORLD.make_benchmark("test", num_games=3, num_turns=2, seed=0)
    write_benchmark(tmp_path / "games.json", asked)
    dit, read = Bundle.open(tiny_bundle).config.dit, []

    class CaptionReader:
        def __init__(self, run, bundle): ...

        def __call__(self, captions):
            read.extend(captions)
            shape = len(captions), dit.num_context_tokens, dit.hidden_size
            return np.random.default_rng(len(read)).normal(size=shape).astype(np.float32)

    monkeypatch.setattr(baseline, "CaptionReader", CaptionReader)
    monkeypatch.setattr(baseline, "_BATCH", 2)
    options = {"benchmark": str(tmp_path / "games.json"), "out": tmp_path / "out", "steps": 2}
    with pytest.raises(UserError, match="--games 4: expected a benchmark of the toy world, and 1"):
        baseline.main(tmp_path / "run", **options, games=4)
    with pytest.raises(UserError, match="--steps: expected 1 or more, found 0"):
        baseline.main(tmp_path / "run", **options | {"steps": 0})
    baseline.main(tmp_path / "run", **options, games=3)
    assert read[2:] == [turn.caption for game in asked.games for turn in game.turns]
    for game in asked.games:
        turns = Game.load(tmp_path / "out" / game.id).turns
        assert [turn.instruction for turn in turns] == [t.instruction for t in game.turns]
        states = [(t.motion_level, t.social, t.entertainment, t.stamina) for t in turns]
        assert states == [
            (t.motion_level, t.social, t.entertainment, t.stamina) for t in game.turns
        ]
        assert all(turn.seconds["total"] > 0 for turn in turns)


def test_a_run_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected checkpoints of foundations --part dit"):
        baseline.load_context(tmp_path, t5_size=4, hidden_size=8)


def test_captions_become_context_by_the_last_checkpoints_layer(tmp_path):
    bundle = write_model(tmp_path / "tiny", networks=("dit", "vae", "t5"))
    dit, t5 = bundle.config.dit, bundle.load("t5")
    size = bundle.config.t5.d_model, dit.hidden_size
    random = np.random.default_rng(0)
    for step in (9, 10):  # 10 is the last, though "9" comes after it in the alphabet
        kernel, bias = (random.normal(size=s).astype(np.float32) for s in (size, size[1:]))
        arrays = {"ema.context.kernel": kernel, "ema.context.bias": bias, "step": np.array(step)}
        folder = tmp_path / "run" / "checkpoints" / str(step)
        folder.mkdir(parents=True)
        write_arrays(epath.Path(folder / "state"), arrays, arrays.items())
    captions = ["Character: Mika; Motion: run.", "Background: day town."]
    tokenizer = Tokenizer.load(bundle.tokenizer_dir, num_queries=dit.num_context_tokens)
    tokens = np.stack([tokenizer.padded(text, dit.num_context_tokens) for text in captions])
    expected = np.asarray(t5(jnp.asarray(tokens))) @ kernel + bias
    found = baseline.CaptionReader(tmp_path / "run", bundle)(captions)
    assert found.shape == (2, dit.num_context_tokens, dit.hidden_size)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert abs(found[0] - found[1]).max() > 1e-3
