"""The scripts around the embedded model: putting it into the package, the table of ablations."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import ablations
import embed
import headline
import jax.numpy as jnp
import numpy as np
import pytest
import stages
from etils import epath
from helpers import make_bundle
from tiny_evaluation import make_evaluation

from animegamer_jax import cli
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data import command as data_command
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.formulas import Estimate
from animegamer_jax.evaluate.report.ablations import Score, read_ablations
from animegamer_jax.evaluate.results import Evaluation, read_results, write_results
from animegamer_jax.sharding import make_mesh
from animegamer_jax.storage.serialization import to_json
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.train import command as train_command
from animegamer_jax.train.run import TrainingRun

ROOT = Path(__file__).parents[2]
OWN = {  # no recipe's defaults
    "pictures": {"pictures": 2, "steps": 12},
    "captions": {"targets": "captions"},
    "decoder": {"dtype": "float32", "text_dropout": 0.3, "steps": 11},
}


def estimate(mean: float, *, within: float = 0) -> Estimate:
    return Estimate(mean, mean - within, mean + within, 10)


def evaluation(model: Bundle, *, name: str = "toy", windows: tuple[int, ...] = (5,), score=0.5):
    """Of games in which every value is `score`."""
    one, *_ = make_evaluation(None, names=(*embed._SHOWN["all turns"], "all three")).systems
    values = {metric: np.full_like(value, score) for metric, value in one.values.items()}
    systems = tuple(
        dataclasses.replace(
            one,
            name=f"{name}-{window}",
            model="/a/folder/of/mine",
            digest=model.digest(),
            values=values,
            settings=one.settings | {"window": window},
        )
        for window in windows
    )
    return dataclasses.replace(make_evaluation(None), benchmark=name, systems=systems)


def write_run_config(folder: Path, stage: str, step: int, **changes: Any) -> None:
    """The run config in the checkpoint of a stage that succeeded."""
    bundle = Bundle.open(folder / stage / "model")
    recipe = to_json(stages._find(stage)[1]) | OWN.get(stage, {})
    about = {
        "stage": stage,
        "recipe": recipe | {"batch_size": 4, "seed": step},
        "networks": to_json(bundle.config),
        "protocol": to_json(bundle.protocol),
        "model": stages._left_before(folder, stage),
    }
    file = folder / stage / "checkpoints" / str(step) / "run_config" / "metadata"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(about | changes))


@pytest.fixture
def trained(tiny_bundle, tmp_path) -> Path:
    """What the training leaves, as far as the scripts read it."""
    folder = tmp_path / "toy"
    for stage in stages.STAGES:
        (folder / stage).mkdir(parents=True)
        (folder / stage / "model").symlink_to(Path(tiny_bundle).absolute())
    for stage in stages.STAGES:
        for step in (2, 10):
            write_run_config(folder, stage, step)
    return folder


def write_evaluations(folder: Path, *evaluations: Evaluation) -> tuple[Path, ...]:
    paths = tuple(folder / f"evaluation-{number}" for number in range(len(evaluations)))
    for path, found in zip(paths, evaluations, strict=True):
        write_results(path, found)
    return paths


# Embedding


def test_a_model_is_embedded_with_its_card(trained, tiny_bundle, tmp_path):
    before = Bundle.open(tiny_bundle)
    found = evaluation(before, windows=(5, 1), score=0.25), evaluation(before, name="toy-phrasings")
    out = tmp_path / "assets" / "toy"
    embed.main(trained, scores=write_evaluations(tmp_path, *found), out=out)
    after = Bundle.open(out)
    assert after.name == "toy"
    assert after.protocol == before.protocol
    assert after.info.stages == before.info.stages
    for name in ("mllm", "dit", "vae", "encoder"):
        assert getattr(after.config, name).param_dtype == "bfloat16"
        assert getattr(after.config, name).dtype == "float32"
        found = after.read_together(name, list(before.leaves(name)))
        for path, array in before.read_together(name, list(found)).items():
            if name in embed._MANTISSA_BITS and array.ndim > 1 and array.size > embed._FEW_WEIGHTS:
                array = embed.round_mantissa(array, embed._MANTISSA_BITS[name])
            np.testing.assert_array_equal(found[path], array.astype(jnp.bfloat16))
    assert after.tokenizer_dir.exists()
    texts = [*out.rglob("*.txt"), *out.rglob("*.json")]
    assert not any(str(tmp_path) in path.read_text() for path in texts)
    assert list(out.parent.iterdir()) == [out]
    card = (out / "README.md").read_text()
    assert "| vae | 9,500 | 4 | 0.002 | float32 | 10 |" in card
    assert "| decoder | 11 | 4 | 0.0015 | float32 | 10 |" in card
    assert "| score | toy, window 5 | toy, window 1 | toy-phrasings, window 5 |" in card
    assert "| ACC-F | 0.250 | 0.250 | 0.500 |" in card
    assert "| open turns: all three | 0.250 | 0.250 | 0.500 |" in card
    assert "| seeds | 0 to 5 | 0 to 5 | 0 to 5 |" in card
    assert "of the model\nbefore its weights were rounded" in card
    assert "Each stage started from the one before" in card
    stored = json.loads((out / "scores.json").read_text())
    assert stored["trained"] == before.digest()
    assert stored["embedded"] == after.digest()
    assert [kept["name"] for kept in stored["systems"]][1:] == [
        "toy, window 1",
        "toy-phrasings, window 5",
    ]
    assert "/a/folder" not in json.dumps(stored)

    embed.main(trained, scores=write_evaluations(tmp_path, evaluation(after)), out=out)
    assert "of the model\nas embedded here" in (out / "README.md").read_text()
    assert Bundle.open(out).digest() == after.digest()


def test_large_weights_are_rounded(monkeypatch, tiny_bundle, tmp_path):
    """Each to the nearest number of the given bits; small arrays keep bfloat16's."""
    x = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32)
    for bits in (3, 5, 7):
        rounded = embed.round_mantissa(x, bits)
        mantissa, _ = np.frexp(rounded)
        assert (mantissa * 2 ** (bits + 1) == np.rint(mantissa * 2 ** (bits + 1))).all()
        assert (np.abs(rounded - x) <= np.abs(x) * 2.0 ** -(bits + 1)).all()
    np.testing.assert_array_equal(embed.round_mantissa(x, 7), x.astype(jnp.bfloat16))

    before = Bundle.open(tiny_bundle)
    monkeypatch.setattr(embed, "_FEW_WEIGHTS", 100)
    embed.write_bundle(before, tmp_path / "toy")
    after = Bundle.open(tmp_path / "toy")
    for name, bits in {"dit": 4, "vae": 7}.items():
        for path, leaf in before.leaves(name).items():
            found, given = after.read(name, path), before.read(name, path)
            kept = 7 if leaf.ndim < 2 or leaf.size <= 100 else bits
            expected = embed.round_mantissa(given, kept).astype(jnp.bfloat16)
            np.testing.assert_array_equal(found, expected)


def test_a_card_shows_what_was_changed_between_stages(trained, tiny_bundle, tmp_path):
    bundle = Bundle.open(tiny_bundle)
    networks = to_json(bundle.config)
    other = networks | {"dit": networks["dit"] | {"num_layers": 3}}
    measured = networks | {"vae": networks["vae"] | {"scaling_factor": 0.125}}
    protocol = to_json(bundle.protocol)
    protocol.pop("guidance_scale")
    write_run_config(trained, "vae", 10, networks=measured)  # what this stage measures at its end
    write_run_config(trained, "warmup", 10, networks=measured, protocol=protocol)
    write_run_config(trained, "decoder", 10, networks=other, model="warmup 0123456789ab")
    write_run_config(trained, "mllm", 10, networks=other)  # which has no need of the decoder
    scale, layers = json.dumps(bundle.protocol.guidance_scale), networks["dit"]["num_layers"]
    found = stages.deviations(trained, bundle)
    assert found == [
        f"`vae.scaling_factor`: {networks['vae']['scaling_factor']} in the model; "
        "trained with 0.125: warmup",
        f"`protocol.guidance_scale`: {scale} in the model; trained without it: warmup",
        f"`dit.num_layers`: {layers} in the model; trained with 3: decoder",
        "the stage before has another `config.json` now than the one that was started from: "
        "decoder",
    ]
    out = tmp_path / "out"
    embed.main(trained, scores=write_evaluations(tmp_path, evaluation(bundle)), out=out)
    card = (out / "README.md").read_text()
    assert all(f"- {line}." in card for line in found)
    assert "Each stage started" not in card


def test_the_model_before_is_named_as_a_checkpoint_names_it(trained, tmp_path):
    kind, recipe = stages._find("warmup")
    bundle = Bundle.open(trained / "dit" / "model")
    run = TrainingRun(
        stage=kind(recipe, bundle.config, bundle.protocol),
        bundle=bundle,
        sources=(),
        out=epath.Path(tmp_path),
        mesh=make_mesh(),
    )
    assert run.run_config()["model"] == stages._left_before(trained, "warmup")


def test_what_cannot_be_embedded(trained, tiny_bundle, tmp_path, monkeypatch):
    bundle, out = Bundle.open(tiny_bundle), tmp_path / "out"
    scores = write_evaluations(tmp_path, evaluation(bundle))
    embed.main(trained, scores=scores, out=out)
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def refused(match: str, *, scores: tuple[Path, ...] = scores) -> None:
        with pytest.raises(UserError, match=match):
            embed.main(trained, scores=scores, out=out)
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept
        assert not list(tmp_path.glob(".out-*"))

    with monkeypatch.context() as patch:
        patch.setattr(embed, "_MOST_BYTES", 10)
        refused("expected at most 10 bytes, found")
    other = Bundle.open(make_bundle(tmp_path / "other", bundle.protocol, seed=1))
    assert other.digest() != bundle.digest()
    refused(
        rf"scores of another model: expected digest {bundle.digest()} \(as trained\) or "
        rf"\w+ \(as embedded\), found {other.digest()}",
        scores=write_evaluations(tmp_path, evaluation(other)),
    )
    both = write_evaluations(tmp_path, evaluation(bundle), evaluation(Bundle.open(out)))
    refused("expected scores of one model, found those of the trained and", scores=both)
    refused("results.json: cannot be read", scores=(tmp_path / "absent",))
    for path in (trained / "mllm" / "checkpoints").rglob("metadata"):
        path.unlink()
    refused(r"mllm: expected the stage's checkpoints, found none")


# The ablations


@pytest.fixture
def runs(tiny_bundle, monkeypatch) -> list[tuple[str, ...]]:
    """The commands that the script gives; what each would make is there at once."""
    found: list[tuple[str, ...]] = []

    def run(*words: str) -> None:
        found.append(words)
        out = Path(words[words.index("--out") + 1])
        out.mkdir(parents=True, exist_ok=True)
        if words[0] == "data":
            (out / "set.json").touch()
            return
        (out / "checkpoints").mkdir()
        (out / "model").symlink_to(Path(tiny_bundle).absolute())

    monkeypatch.setattr(ablations, "_run", run)
    return found


@pytest.fixture
def scored(monkeypatch) -> list[str]:
    """The rows that are scored, each as good as any."""
    found: list[str] = []
    scores = dict.fromkeys(ablations._METRICS, estimate(0.5, within=0.1))

    def score_decoder(model: Path, row: ablations.Row, *, benchmark, suite) -> dict:
        assert suite == "suite"
        assert len(benchmark.games) in (3, 4)
        assert (model / "config.json").exists()
        found.append(row.name)
        return scores

    def score_games(row: ablations.Row, model: Path, *, out: Path, benchmark) -> dict:
        assert out.name == f"games-{benchmark.games[0].seed}-{len(benchmark.games)}"
        assert (model / "config.json").exists()
        found.append(row.name)
        return scores | dict.fromkeys(("ACC-S", "open turns: all three"), estimate(0.5))

    monkeypatch.setattr(ablations, "make_decoder_suite", lambda model, benchmark: "suite")
    monkeypatch.setattr(ablations, "score_decoder", score_decoder)
    monkeypatch.setattr(ablations, "score_games", score_games)
    return found


def value(words: tuple[str, ...], option: str) -> str:
    """Of an option, the last if it comes twice."""
    return words[len(words) - words[::-1].index(option)]


def test_rows_are_trained_as_the_model_was(trained, runs, scored, tmp_path):
    page, rows = tmp_path / "page.md", (*ablations.DECODER, *ablations.GAME)
    ablations.main(trained, games=3, page=page, rows=page.with_suffix(".json"))
    features, *training = runs
    assert features[:2] == ("data", "features")
    assert value(features, "--frame") == "random"
    home, random = trained / "ablations", "random-instead-of-first-frame"
    blind = "no-pictures-in-the-history"
    expected = [
        (f"{random}/warmup", trained / "dit"),
        (f"{random}/pictures", home / random / "warmup"),
        (f"{random}/decoder", home / random / "pictures"),
        ("no-warm-up/warmup", trained / "dit"),
        ("no-warm-up/pictures", home / "no-warm-up" / "warmup"),
        ("no-warm-up/decoder", home / "no-warm-up" / "pictures"),
        ("no-motion-input/decoder", trained / "pictures"),
        (f"{blind}/mllm", trained / "captions"),
        (f"{blind}/adapt", home / blind / "mllm"),
        (f"{blind}/picture", home / blind / "adapt"),
    ]
    assert [value(words, "--out") for words in training] == [str(home / e[0]) for e in expected]
    assert [value(words, "--model") for words in training] == [f"{e[1]}/model" for e in expected]
    for words in runs:
        name, rest = cli._choose(list(words))
        if words[0] == "data":
            cli.parse(data_command.features, f"animegamer {name}", rest)
            continue
        function = getattr(train_command, words[1]).for_words(rest)
        recipe = cli.parse(function, f"animegamer {name}", rest)[1]["recipe"]
        if value(words, "--out").endswith("/pictures"):
            assert (words[1], recipe.pictures, recipe.steps) == ("decoder", 2, 12)
        elif words[1] == "decoder":
            assert recipe.pictures == 0
            assert (recipe.dtype, recipe.text_dropout, recipe.steps) == ("float32", 0.3, 11)
            assert recipe.motion == ("none" if "no-motion-input" in str(words) else "measured")
        elif words[1] == "warmup" and "no-warm-up" in str(words):
            assert (recipe.steps, recipe.optimizer.learning_rate) == (1, 0)
        data = "ablations/features-random" if "random-instead" in str(words) else "features"
        assert value(words, "--data") == str(trained / data)
        assert not (Path(value(words, "--out")) / "checkpoints").exists()
    assert scored == [row.name for row in rows]
    text = page.read_text()
    assert "trained by the same recipe, 11 steps" in text
    assert "have changed since" not in text
    assert text.count("\n| ") == 2 + len(rows)
    assert "ACC-F +0.000 (-0.255), within noise" in text
    kept = read_ablations(page.with_suffix(".json"))
    assert [(row.name, row.part) for row in kept.rows] == [
        (row.name, "game" if row in ablations.GAME else "decoder") for row in rows
    ]
    assert kept.rows[-2].scores["open turns: all three"].mean == 0.5
    assert kept.rows[1].paper["ACC-F"] == 0.474


def test_what_was_trained_is_trained_again_only_from_other_inputs(
    trained, runs, scored, tiny_bundle, tmp_path
):
    page = tmp_path / "page.md"
    for games, seed in ((3, 0), (3, 0), (4, 5)):
        scored.clear()
        ablations.main(trained, games=games, seed=seed, page=page, rows=page.with_suffix(".json"))
        assert len(scored) == len(ablations.DECODER) + len(ablations.GAME)
    assert len(runs) == 11  # features, and what every row trains for itself
    runs.clear()
    (trained / "dit" / "model").unlink()
    make_bundle(trained / "dit" / "model", Bundle.open(tiny_bundle).protocol, seed=1)
    ablations.main(trained, games=4, seed=5, page=page, rows=page.with_suffix(".json"))
    assert [Path(value(words, "--out")).parent.name for words in runs] == [
        "random-instead-of-first-frame",
        "no-warm-up",
    ]  # the stub gives the same warm-up as before, from which the decoders start
    runs.clear()
    write_run_config(trained, "decoder", 20, recipe={"steps": 12})
    ablations.main(trained, games=4, seed=5, page=page, rows=page.with_suffix(".json"))
    assert [Path(value(words, "--out")).name for words in runs] == ["decoder"] * 3
    assert all(value(words, "--steps") == "12" for words in runs)
    assert "fields that the recipe did not have" in page.read_text()


def test_equal_steps_for_every_row(trained, runs, scored, tmp_path):
    page = tmp_path / "page.md"
    ablations.main(trained, games=3, page=page, rows=page.with_suffix(".json"))
    runs.clear()
    ablations.main(trained, games=3, steps=7, page=page, rows=page.with_suffix(".json"))
    decoders = [words for words in runs if value(words, "--out").endswith("decoder")]
    assert [value(words, "--steps") for words in decoders] == ["7"] * 4
    assert value(decoders[0], "--model") == str(trained / "pictures" / "model")
    assert [value(w, "--steps") for w in runs if w[1] == "warmup" and "--steps" in w] == ["1"]
    text = page.read_text()
    assert "ablations.py out/toy --steps 7`" in text
    assert "every row, the first included, was trained for 7 steps; the model's own was for 11" in (
        text
    )
    for option, number in (("steps", 0), ("games", 0)):
        with pytest.raises(UserError, match=f"--{option}: expected 1 or more, found 0"):
            ablations.main(trained, page=page, **{option: number})


def test_a_training_that_was_stopped_keeps_its_checkpoints(trained, runs, scored, monkeypatch):
    row, home = ablations.DECODER[-1], trained / "ablations"
    whole, out = ablations._run, home / "no-motion-input" / "decoder"
    monkeypatch.setattr(ablations, "_run", lambda *words: (out / "checkpoints").mkdir())
    with pytest.raises(UserError, match="stopped before its end: the same command continues"):
        ablations.train_row(row, trained, home=home)
    assert (out / "checkpoints").exists()
    (out / "checkpoints").rmdir()
    monkeypatch.setattr(ablations, "_run", whole)
    assert ablations.train_row(row, trained, home=home) == out / "model"
    assert not (out / "checkpoints").exists()


def test_a_recipe_whose_field_there_is_no_more(trained):
    write_run_config(trained, "decoder", 20, recipe={"steps": 5, "spin": 1})
    with pytest.raises(
        UserError, match="decoder: its recipe has spin, which is no longer a field of recipes"
    ):
        stages.recipe_options(trained, "decoder")


def test_a_command_runs_in_this_process(monkeypatch):
    given: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda words: given.append(words) or len(words) // 3)
    ablations._run("data", "features")
    assert given == [["data", "features"]]
    with pytest.raises(UserError, match="animegamer train decoder: failed with status 1"):
        ablations._run("train", "decoder", "--fail")


def test_a_training_has_the_devices_of_train_toy(monkeypatch):
    script = (ROOT / "scripts" / "toy" / "train.sh").read_text()
    named = re.search(r"^DEVICES=(.*)\$\{CORES:-(\d+)\}$", script, re.M)
    assert named
    monkeypatch.delenv("CORES", raising=False)
    assert stages.xla_flags().split()[0] == named[1] + named[2]
    monkeypatch.setenv("CORES", "5")
    assert stages.xla_flags() == f"{named[1]}5 {os.environ['XLA_FLAGS']}"


def test_games_are_scored_by_an_evaluation(tiny_bundle, tmp_path):
    """With a tiny model, which cannot play the toy world's games at their size."""
    benchmark = WORLD.make_benchmark("test", num_games=1, num_turns=2, seed=4)
    row = ablations.GAME[-1]
    scores = ablations.score_games(
        row, Path(tiny_bundle), out=tmp_path / "games", benchmark=benchmark, classifier_clips=48
    )
    assert {"ACC-F", "MAE-F", "ACC-S"} <= scores.keys()
    assert scores["ACC-S"].count == 2
    (system,) = read_results(tmp_path / "games").systems
    assert (system.name, system.settings["window"]) == ("window of 1", 1)


def test_the_table_of_ablations():
    rows = []
    for number, row in enumerate(ablations.DECODER):
        scores = dict.fromkeys(ablations._METRICS, estimate(0.9 - 0.1 * number, within=0.1))
        rows.append(ablations._row(row, "decoder", scores))
    lines = ablations.describe(rows)
    assert len(lines) == 2 + len(rows)
    assert lines[2].startswith("| decoder alone | 0.900 (0.8672) | 0.900 (0.729) | 0.900 (0.403) |")
    signs = ablations.compare(rows)
    assert len(signs) == len(rows) - 1
    assert "CLIP-I -0.100 (-0.023), within noise" in signs[0]
    assert "CLIP-I -0.200 (-0.037), as in the paper" in signs[1]
    assert "MAE-F -0.200 (+0.055), NOT as in the paper" in signs[1]


def test_an_interval_of_a_difference():
    found = ablations.difference(Score(0.5, 0.2, 0.7), Score(0.9, 0.8, 1.3))
    assert found == pytest.approx((-0.4, -0.4 - 0.5, -0.4 + np.hypot(0.2, 0.1)))


# The README's table


def test_the_headline_is_that_of_two_windows(tiny_bundle):
    found = evaluation(Bundle.open(tiny_bundle), windows=(5, 1), score=0.25)
    own = found.systems[0]
    values = {name: np.full_like(value, 0.75) for name, value in own.values.items()}
    reference = {headline.THROUGH_VAE: values, headline.NO_MEMORY: {"all three": values["ACC-F"]}}
    systems = (dataclasses.replace(own, reference=reference), found.systems[1])
    lines = list(headline.lines(dataclasses.replace(found, systems=systems)))
    assert len(lines) == 2 + len(headline.ROWS) + 2
    assert "(ACC-F) | 0.250 (0.250 to 0.250) | 0.75 | 0.75 |" in lines[3]
    assert lines[-1].startswith("| the same without memory (window 1) | 0.250 (0.250 to 0.250) |")
    assert "| 0.750, the expected score of any model without memory |" in lines[-1]
    with pytest.raises(UserError, match="with --window 5 1 or with --played"):
        list(headline.lines(dataclasses.replace(found, systems=systems[:1])))


def test_a_baseline_stands_between_the_model_and_the_paper(tiny_bundle):
    found = evaluation(Bundle.open(tiny_bundle), windows=(5, 1), score=0.25)
    own, other = found.systems
    values = {name: np.full_like(own.values["ACC-F"], 0.25) for name in ("ACC-F", "MAE-F")}
    own = dataclasses.replace(own, name="toy", values=values)
    values = {name: value + 0.5 for name, value in values.items()} | {"CLIP-I": values["ACC-F"]}
    other = dataclasses.replace(other, name="baseline", digest=None, values=values)
    lines = list(headline.lines(dataclasses.replace(found, systems=(own, other))))
    assert lines[0].startswith("| | toy | baseline | difference |")
    assert [line.split(" |")[0] for line in lines[2:]] == ["| ACC-F", "| MAE-F (lower is better)"]
    cells = [cell.strip() for cell in lines[2].split("|")[2:-1]]
    assert cells[:3] == [f"{x} ({x} to {x})" for x in ("0.250", "0.750", "-0.500")]
    assert cells[3:] == ["0.6744", "0.4249"]
