"""`animegamer bench`: its rows, PyTorch's answers next to ours, what is refused, the stopwatch."""

import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import random_leaves, tiny_config, write_tokenizer
from tiny_games import write_model

from animegamer_jax import cli
from animegamer_jax.bench import command, run, timing, training
from animegamer_jax.bench.compare import Difference, check_agreement, compute_differences
from animegamer_jax.bench.model import (
    PLAYING,
    Model,
    RandomBundle,
    make_middle,
    write_middle,
)
from animegamer_jax.bench.names import PLAY
from animegamer_jax.bench.programs import Compiled, Program, play_programs
from animegamer_jax.bundle.bundle import Bundle, BundleWriter, abstract_params, param_leaves
from animegamer_jax.configs import make_full
from animegamer_jax.convert.export import fits_released_code
from animegamer_jax.errors import UserError
from animegamer_jax.game.loading import check_fit
from animegamer_jax.protocol import RELEASED
from animegamer_jax.tokenizer import Tokenizer

use_threads = command._use_threads


@pytest.fixture(scope="module")
def torch_networks() -> Any:
    """The module that needs diffusers, which takes long to import."""
    module = pytest.importorskip("animegamer_jax.bench.torch_networks", exc_type=ImportError)
    gc.freeze()  # garbage is collected before memory is measured: not through all of diffusers
    return module


@pytest.fixture(autouse=True)
def _small_peak(monkeypatch):
    """The product by which the peak is found would be most of a test's time."""
    monkeypatch.setattr(timing, "_PEAK_SIZE", 64)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """PyTorch's threads wait for one another, and other tests run on the same cores."""
    monkeypatch.setattr(command, "_use_threads", lambda threads: 1)


@pytest.fixture(scope="module")
def embedded_form(tmp_path_factory) -> Path:
    """A tiny model of the embedded one's form, that plays by the released protocol."""
    folder = tmp_path_factory.mktemp("bench")
    size = write_tokenizer(folder / "tokenizer")
    config: Any = tiny_config(size)
    dit = dataclasses.replace(
        config.dit, output="clean", clean_std=0.05, context_grid=(2, 3), intermediate_size=96
    )
    vae = dataclasses.replace(
        config.vae,
        multipliers=(1, 2),
        temporal_compression=2,
        kernel_frames=1,
        scaling_factor=0.7,
        frequency_scales=(0.7, 2.0, 1.5),
    )
    mistral = dataclasses.replace(config.mllm.mistral, rotary_dtype="float16", lora=None)
    protocol = dataclasses.replace(
        RELEASED,
        window=2,
        caption_length=96,
        guidance_scale=1.5,
        picture_first=True,
        motion_guidance=3.0,
    )
    networks = {
        "mllm": dataclasses.replace(config.mllm, mistral=mistral),
        "encoder": config.encoder,
        "dit": dataclasses.replace(dit, lora=None),
        "vae": vae,
        "clip": config.clip,
    }
    with BundleWriter(folder / "model", name="tiny", protocol=protocol) as writer:
        for name, network in networks.items():
            writer.write_network(name, network, random_leaves(name, network, 0))
        writer.write_tokenizer(folder / "tokenizer")
    return folder / "model"


def bench(capsys, *words: str) -> tuple[int, str, str]:
    """Status, standard output, and the last line of the other one."""
    status = cli.main(["bench", "--repeats", "3", "--steps", "2", *words])
    out, err = capsys.readouterr()
    return status, out, err.strip().splitlines()[-1] if err.strip() else ""


# --- the command ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["released", pytest.param("embedded", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("torch_networks")
def test_pytorch_answers_the_same(form, tiny_bundle, embedded_form, capsys, tmp_path):
    """Every program has its rows in the tables and in the file, and all backends agree."""
    path = {"released": tiny_bundle, "embedded": embedded_form}[form]
    released = fits_released_code(Bundle.open(path).config)
    assert released == (form == "released")
    file = tmp_path / "found.json"
    words = ("--model", str(path), "--against", "torch", "--torch", "eager", "--json", str(file))
    status, out, err = bench(capsys, *words)
    assert status == 0, err
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["programs"]] == list(PLAY)
    assert found["setup"]["dtype"] == "float32"
    assert found["setup"]["threads"] >= 1
    assert set(found["setup"]["versions"]) >= {"jax", "torch", "diffusers", "transformers"}
    for row in found["programs"]:
        if form == "embedded" and row["name"] == "turn":
            assert set(row["backends"]) == {"jax"}, "PyTorch cannot see the picture drawn first"
            continue
        assert out.count(f"| {row['name']} ") == 3, (
            out
        )  # in the programs' table, and once for each backend
        assert set(row["backends"]) == {"jax", "torch eager"}
        ours, theirs = row["backends"]["jax"], row["backends"]["torch eager"]
        assert len(ours["seconds"]) == len(theirs["seconds"]) == 3
        assert ours["p10"] <= ours["median"] <= ours["p90"]
        assert row["flops"] > 0
        assert ours["compile_seconds"] > 0
        assert row["memory"]["temporaries"] > 0
        assert theirs["times_as_long"]["low"] <= theirs["times_as_long"]["high"]
        assert ours["share_of_peak"] > 0
        for difference in theirs["differences"]:
            small = 0 if difference["what"] == "states" else 0.02
            small = small if difference["what"] == "frames" else min(small, 3e-5)
            assert difference["rms"] <= small, (row["name"], difference)
    if form == "embedded":
        return
    turn = found["programs"][-1]["backends"]["torch eager"]["differences"]
    assert [one["what"] for one in turn] == ["representation", "states", "frames"]


def test_another_answer_is_refused(torch_networks, tiny_bundle, capsys, monkeypatch):
    released_weights = torch_networks.released_weights

    def perturbed(bundle):
        weights = released_weights(bundle)
        weights["dit"]["transformer.layers.1.mlp.dense_h_to_4h.weight"] *= 1.05
        return weights

    monkeypatch.setattr(torch_networks, "released_weights", perturbed)
    words = ("--model", str(tiny_bundle), "--programs", "mllm", "step", "--against", "torch")
    status, out, err = bench(capsys, *words, "--torch", "eager")
    assert status == 2
    assert out == ""
    assert err.startswith("animegamer bench: step: the outputs of torch eager differ: ")
    assert "expected 0.001 or less" in err


def test_low_rank_updates_come_along(torch_networks, tiny_bundle):
    """The tiny model has some: without them PyTorch would answer otherwise."""
    weights = torch_networks.released_weights(Bundle.open(tiny_bundle))
    name = "transformer.layers.0.attention.dense"
    plain = weights["dit"][f"{name}.original.weight"]
    merged = torch_networks._merged(weights["dit"], name, scale=0.5)
    assert float((merged - plain).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--programs", "frob"], "invalid choice 'frob'"),
        (["--repeats", "0"], "--repeats 0: expected 1 or more"),
        (["--model", "/nowhere"], "/nowhere: not a bundle"),
        (["--json", "/nowhere/found.json"], "--json /nowhere/found.json: expected a file in"),
        (["--against", "torch", "--programs", "vae", "train-mllm"], "train-mllm: only the parts"),
    ],
)
def test_one_line_for_a_mistake(capsys, words, reported):
    assert cli.main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert reported in err
    assert err.count("\n") == 1, err


def test_cores(monkeypatch):
    there = 2
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(there)), raising=False)
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None, raising=False)
    for threads in (0, there + 1):
        with pytest.raises(UserError, match="expected 1 to 2, the number of cores"):
            use_threads(threads)
    with pytest.raises(UserError, match="JAX has already started with 2"):
        use_threads(1)
    assert use_threads(None) == use_threads(there) == there


def test_a_stage_without_its_networks(tiny_bundle, capsys):
    words = ("--model", str(tiny_bundle), "--programs", "train-clip")
    status, _, err = bench(capsys, *words)
    assert status == 2
    assert "--programs train-clip: tiny lacks a network of this stage" in err
    assert "train-mllm, train-adapt" in err


@pytest.mark.parametrize("library", ["torch", "diffusers"])
def test_pytorch_that_is_not_installed(library, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    assert cli.main(["bench", "--against", "torch"]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith(f"animegamer bench: needs {library}, which is not installed: pip")
    assert reported.count("\n") == 1


# --- programs -------------------------------------------------------------------------------


def test_the_middle_size_is_what_it_says(tmp_path):
    config = make_middle()
    check_fit(config)
    assert fits_released_code(config)
    assert config.dit is not None
    remembers = dataclasses.replace(config.dit, memory=2)
    assert not fits_released_code(dataclasses.replace(config, dit=remembers))
    assert (config.dit.hidden_size, config.dit.num_layers) == (480, 8)
    assert config.dit.num_patches + config.dit.num_context_tokens == 2000
    assert config.vae is not None
    assert config.vae.channels == 32
    space = config.vae.spatial_compression
    assert (config.dit.latent_height * space, config.dit.latent_width * space) == (128, 192)


def test_a_random_model_is_the_same_every_time(tmp_path):
    digests = []
    for place in ("a", "b"):
        bundle = write_middle(tmp_path / place, tiny_config(0))
        digests.append(bundle.digest())
        words = "Character: Mika; Motion: run."
        model = Model(bundle, dtype="float32", window=None, steps=2)
        assert model.player.tokenizer.unknown_words(words) == ()
    assert digests[0] == digests[1]
    assert int(model.inputs.window.num_turns[0]) == model.player.window - 1
    assert set(play_programs(model)) == set(PLAY)
    config = tiny_config(0)
    assert config.dit is not None
    remembers = dataclasses.replace(config, dit=dataclasses.replace(config.dit, memory=1))
    bundle = write_middle(tmp_path / "remembers", remembers)
    longer = Model(bundle, dtype="float32", window=None, steps=2)
    found = longer.inputs.window.first_latents
    assert found is not None
    assert np.asarray(found).any()
    np.testing.assert_array_equal(longer.inputs.state.memory, found[:, -1:])
    frame = remembers.dit.num_memory_tokens
    assert longer.num_tokens == model.num_tokens + frame
    step = play_programs(longer)["step"]
    assert f"of {longer.num_tokens} tokens" in step.description
    made = jax.jit(step.function)(*step.arguments)
    assert np.isfinite(made.x).all()


@pytest.mark.slow
@pytest.mark.usefixtures("torch_networks")
def test_the_released_size_with_weights_made_on_the_device(capsys, monkeypatch, tmp_path):
    """At a tiny size: both sides have all tensors, in bfloat16; nothing is compared."""
    size: Any = tiny_config(512)
    monkeypatch.setattr("animegamer_jax.bench.model.make_full", lambda: size)
    file = tmp_path / "found.json"
    words = ("--model", "full", "--against", "torch", "--torch", "eager", "--json", str(file))
    status, _, err = bench(capsys, *words)
    assert status == 0, err
    found = json.loads(file.read_text())
    assert found["setup"]["dtype"] == "bfloat16"
    assert [row["name"] for row in found["programs"]] == list(PLAY)
    for row in found["programs"]:
        assert row["backends"]["torch eager"]["differences"] == []
        assert len(row["backends"]["torch eager"]["seconds"]) == 3
    status, _, err = bench(capsys, "--model", "full", "--programs", "train-mllm")
    assert status == 2
    assert "--model full: train-mllm: only the parts of a turn have random weights" in err


def test_random_weights_are_of_every_tensor(tmp_path):
    size: Any = tiny_config(512)
    bundle = RandomBundle(tmp_path, size, name="random")
    assert bundle.config.dit is not None
    assert bundle.config.dit.lora is None  # merged, as for play
    for name in PLAYING:
        expected = abstract_params(name, getattr(bundle.config, name))
        network = bundle.load(name, dtype="bfloat16", param_dtype="bfloat16")
        found = dict(param_leaves(network))
        assert found.keys() == expected.keys()
        for path, leaf in found.items():
            assert leaf.shape == expected[path].shape
            assert leaf.dtype.name == "bfloat16"
            values = leaf.astype(np.float32)
            assert np.isfinite(values).all()
            assert (values != 0).mean() > 0.9
    again = dict(param_leaves(bundle.load("dit")))
    assert all(np.array_equal(x, again[n]) for n, x in param_leaves(bundle.load("dit")))
    with pytest.raises(ValueError, match="64 entries are too few"):
        RandomBundle(tmp_path / "other", tiny_config(64), name="random")


def test_released_size_names_every_released_weight(tmp_path):
    """The full size as play holds it: as many weights as `doctor` counts, less the updates."""
    bundle = RandomBundle(tmp_path, make_full(), name="full")
    count = sum(
        leaf.size
        for name in PLAYING
        for leaf in abstract_params(name, getattr(bundle.config, name)).values()
    )
    assert 9.0e9 < count < 9.5e9
    assert len(Tokenizer.load(bundle.tokenizer_dir, num_queries=1)) == 32_284


@pytest.mark.parametrize(("backend", "works"), [("tpu", True), ("gpu", False)])
def test_pytorch_must_reach_the_same_device(backend, works, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr("torch.cuda.is_available", lambda: works)
    with pytest.raises(UserError, match=f"PyTorch does not reach the {backend}"):
        command._torch_device()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    if backend == "gpu":
        assert command._torch_device() == "cuda"


def test_products_are_counted_in_all_steps(tiny_bundle):
    model = Model(Bundle.open(tiny_bundle), dtype=None, window=None, steps=4)
    programs = play_programs(model)
    one, four = (Compiled(programs[name]).flops for name in ("step", "sampler"))
    assert four == 4 * one


def test_a_training_step_goes_on_from_its_state(tmp_path, capsys):
    bundle = write_model(tmp_path)
    assert training.trainable(bundle) == (
        *("train-warmup", "train-decoder", "train-mllm", "train-adapt"),
    )
    program = training.training_program("train-warmup", bundle, dtype="float32", batch_size=2)
    compiled = Compiled(program)
    states = [compiled()[0] for _ in range(2)]
    assert int(states[1].step) == 2
    assert compiled.flops > 0
    row = run._time(compiled, {}, repeats=2)
    assert len(row.jax.seconds) == 2
    assert "2 clips" in row.description


# --- stopwatch ------------------------------------------------------------------------------


def test_backends_take_turns():
    called: list[str] = []
    calls = {name: (lambda name=name: called.append(name)) for name in "abc"}
    taken = timing.alternate(calls, repeats=4, rest=0.0)
    rounds = ["".join(called[i : i + 3]) for i in range(0, 12, 3)]
    assert rounds == ["abc", "bca", "cab", "abc"]
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(second >= 0 for seconds in taken.values() for second in seconds)


def test_spread_and_ratio():
    values = [float(x) for x in range(1, 12)]
    assert timing.spread(values) == (6.0, 2.0, 10.0)
    assert timing.spread([3.0]) == (3.0, 3.0, 3.0)
    # Of neighbours: that both were slow in the second round does not show.
    assert timing.ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == (2.0, 2.0, 2.0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux reports it")
def test_memory_of_a_call():
    def call() -> float:
        return float(np.ones(25_000_000, np.float32).sum())

    found = timing.call_memory(call)
    assert found is not None
    assert 90e6 < found < 200e6


def test_the_peak_is_a_rate():
    rates = timing.measure_peak(size=64, rounds=2)
    assert set(rates) == {"numpy", "XLA"}
    assert min(rates.values()) > 1e6


def test_a_compiled_program_says_its_memory():
    x = jax.numpy.ones((8, 16))
    program = Program(name="p", description="a product", function=lambda x: x @ x.T, arguments=(x,))
    compiled = Compiled(program)
    assert compiled.flops == 2 * 8 * 8 * 16
    assert compiled.memory is not None
    assert compiled.memory.arguments == 4 * 8 * 16
    assert compiled.memory.outputs == 4 * 8 * 8
    assert compiled.outputs() == {}


# --- agreement ------------------------------------------------------------------------------


def test_differences_by_kind():
    ours = {
        "latents": np.full((2, 3), 2.0, np.float32),
        "states": np.array([[3, 1, 0, -1]]),
        "frames": np.full((4,), 200, np.uint8),
    }
    found = {
        "latents": ours["latents"] + np.float32(0.2),
        "states": np.array([[3, 1, 1, -1]]),
        "frames": np.array([200, 200, 200, 202], np.uint8),
    }
    latents, states, frames = compute_differences(found, ours, dtype="float32")
    assert latents.rms == pytest.approx(0.1)
    assert latents.largest == pytest.approx(0.2)
    assert (states.rms, states.agrees) == (0.25, False)
    assert (frames.rms, frames.largest) == (1.0, 2.0)
    assert not any(one.agrees for one in (latents, states, frames))
    assert compute_differences(found, ours, dtype="bfloat16")[0].agrees
    with pytest.raises(ValueError, match="shape"):
        compute_differences({"a": np.zeros(2)}, {"a": np.zeros(3)}, dtype="float32")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_never_agrees(bad):
    ours = {"latents": np.ones(3, np.float32)}
    found = {"latents": np.array([1, 1, bad], np.float32)}
    reported = compute_differences(found, ours, dtype="float32")
    with pytest.raises(UserError, match=r"^step: the outputs of PyTorch differ: latents by"):
        check_agreement("step", "PyTorch", reported)
    fine = Difference(what="latents", largest=1e-6, rms=1e-6, tolerance=1e-3)
    check_agreement("step", "PyTorch", [fine])
