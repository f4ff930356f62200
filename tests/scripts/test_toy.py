"""The scripts around the embedded model: putting it into the package, the table of ablations."""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ablations
import embed
import jax.numpy as jnp
import numpy as np
import pytest
import stages
from etils import epath
from helpers import make_bundle

from animegamer_jax import cli
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.config import to_json
from animegamer_jax.data import command as data_command
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.report.ablations import read_ablations
from animegamer_jax.sharding import make_mesh
from animegamer_jax.train import command as train_command
from animegamer_jax.train.loop import Run

ROOT = Path(__file__).parents[2]
OWN = {"decoder": {"dtype": "float32", "text_dropout": 0.3, "steps": 11}}  # no recipe's defaults


def estimate(mean: float, *, within: float = 0) -> dict[str, float]:
    return {"mean": mean, "low": mean - within, "high": mean + within, "count": 10}


def report(model: Bundle, *, split="test", window: int | None = None, score: float = 0.5) -> dict:
    tables = {table: dict.fromkeys(rows, estimate(score)) for table, rows in embed._SHOWN.items()}
    settings = {"split": split, "window": window, "games": 100, "turns": 5, "steps": 50}
    settings |= {"first_seed": 0, "reader_clips": 960, "model_digest": model.digest()}
    return {"settings": settings | {"model": "/a/folder/of/mine"}, **tables}


def write_run_config(folder: Path, stage: str, step: int, **changes: Any) -> None:
    """What a checkpoint tells of itself, of a stage that went as it should."""
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


def write_reports(folder: Path, *reports: dict) -> tuple[Path, ...]:
    paths = tuple(folder / f"{number}.json" for number in range(len(reports)))
    for path, found in zip(paths, reports, strict=True):
        path.write_text(json.dumps(found))
    return paths


# Embedding


def test_a_model_is_embedded_with_its_card(trained, tiny_bundle, tmp_path):
    before = Bundle.open(tiny_bundle)
    reports = report(before, score=0.25), report(before, split="phrasings", window=1)
    out = tmp_path / "assets" / "toy"
    embed.main(trained, scores=write_reports(tmp_path, *reports), out=out)
    after = Bundle.open(out)
    assert after.name == "toy"
    assert after.protocol == before.protocol
    assert after.info.stages == before.info.stages
    for name in ("mllm", "dit", "vae", "encoder"):
        assert getattr(after.config, name).param_dtype == "bfloat16"
        assert getattr(after.config, name).dtype == "float32"
        found = after.read_together(name, list(before.leaves(name)))
        for path, array in before.read_together(name, list(found)).items():
            np.testing.assert_array_equal(found[path], array.astype(jnp.bfloat16))
    assert after.tokenizer_dir.exists()
    texts = [*out.rglob("*.txt"), *out.rglob("*.json")]
    assert not any(str(tmp_path) in path.read_text() for path in texts)
    assert list(out.parent.iterdir()) == [out]
    card = (out / "README.md").read_text()
    assert "| vae | 1,500 | 4 | 0.002 | float32 | 10 |" in card
    assert "| decoder | 11 | 4 | 0.0015 | float32 | 10 |" in card
    assert "| score | test | phrasings, window 1 |" in card
    assert "| ACC-F | 0.250 | 0.500 |" in card
    assert "| clips that readers learnt from | 960 | 960 |" in card
    assert "of the model before it was cast to bfloat16" in card
    assert "Each stage started from what the one before it left" in card
    stored = json.loads((out / "scores.json").read_text())
    assert stored["trained"] == before.digest()
    assert stored["embedded"] == after.digest()
    assert [kept["settings"]["split"] for kept in stored["reports"]] == ["test", "phrasings"]
    assert "/a/folder" not in json.dumps(stored)

    embed.main(trained, scores=write_reports(tmp_path, report(after)), out=out)
    assert "of the model as it is here" in (out / "README.md").read_text()
    assert Bundle.open(out).digest() == after.digest()


def test_a_card_tells_what_was_changed_between_stages(trained, tiny_bundle, tmp_path):
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
    embed.main(trained, scores=write_reports(tmp_path, report(bundle)), out=out)
    card = (out / "README.md").read_text()
    assert all(f"- {line}." in card for line in found)
    assert "Each stage started" not in card


def test_the_model_before_is_named_as_a_checkpoint_names_it(trained, tmp_path):
    kind, recipe = stages._find("warmup")
    bundle = Bundle.open(trained / "dit" / "model")
    run = Run(
        stage=kind(recipe, bundle.config, bundle.protocol),
        bundle=bundle,
        sources=(),
        out=epath.Path(tmp_path),
        mesh=make_mesh(),
    )
    assert run.about()["model"] == stages._left_before(trained, "warmup")


def test_what_cannot_be_embedded(trained, tiny_bundle, tmp_path, monkeypatch):
    bundle, out = Bundle.open(tiny_bundle), tmp_path / "out"
    scores = write_reports(tmp_path, report(bundle))
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
        rf"scores of another model: expected model_digest {bundle.digest()} \(as trained\) or "
        rf"\w+ \(as embedded\), found {other.digest()}",
        scores=write_reports(tmp_path, report(other)),
    )
    both = write_reports(tmp_path, report(bundle), report(Bundle.open(out)))
    refused("expected reports of one model, found 2 of 2", scores=both)
    refused("no report of scripts/toy/score.py", scores=(tmp_path / "absent.json",))
    refused("no report of scripts/toy/score.py", scores=write_reports(tmp_path, {"settings": 1}))
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

    def score(model: Path, row: ablations.Row, setting: str) -> dict:
        assert setting in ("of 3 games", "of 4 games")
        assert (model / "config.json").exists()
        found.append(row.name)
        names = (*ablations._COLUMNS, "ACC-S", "all three")
        scores = dict.fromkeys(names, estimate(0.5, within=0.1))
        return {"all_turns": scores, "open_turns": scores}

    def make_setting(model: Path, *, games: int, seed: int) -> str:
        return f"of {games} games"

    monkeypatch.setattr(ablations, "make_setting", make_setting)
    monkeypatch.setattr(ablations, "score_decoder", score)
    monkeypatch.setattr(ablations, "score_game", score)
    return found


def value(words: tuple[str, ...], option: str) -> str:
    """Of an option, the last if it is told twice."""
    return words[len(words) - words[::-1].index(option)]


def test_rows_are_trained_as_the_model_was(trained, runs, scored, tmp_path):
    page, rows = tmp_path / "page.md", (*ablations.DECODER, *ablations.GAME)
    ablations.main(trained, games=3, page=page, rows=page.with_suffix(".json"))
    features, *training = runs
    assert features[:2] == ("data", "features")
    assert value(features, "--frame") == "random"
    home = trained / "ablations"
    expected = [
        ("random-instead-of-first-frame/warmup", trained / "dit"),
        (
            "random-instead-of-first-frame/decoder",
            home / "random-instead-of-first-frame" / "warmup",
        ),
        ("no-warm-up/warmup", trained / "dit"),
        ("no-warm-up/decoder", home / "no-warm-up" / "warmup"),
        ("no-motion-input/decoder", trained / "warmup"),
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
        if words[1] == "decoder":
            assert (recipe.dtype, recipe.text_dropout, recipe.steps) == ("float32", 0.3, 11)
            assert recipe.motion == ("none" if "no-motion-input" in str(words) else "measured")
        elif "no-warm-up" in str(words):
            assert (recipe.steps, recipe.optimizer.learning_rate) == (1, 0)
        data = "ablations/features-random" if "random-instead" in str(words) else "features"
        assert value(words, "--data") == str(trained / data)
        assert not (Path(value(words, "--out")) / "checkpoints").exists()
    assert scored == [row.name for row in rows]
    text = page.read_text()
    assert "trained by the same recipe, 11 steps" in text
    assert "has changed since" not in text
    assert text.count("\n| ") == 2 + len(rows)
    assert "ACC-F +0.000 (-0.255), within noise" in text
    kept = read_ablations(page.with_suffix(".json"))
    assert [(row.name, row.part) for row in kept.rows] == [
        (row.name, "game" if row in ablations.GAME else "decoder") for row in rows
    ]
    assert kept.rows[-2].scores["open turns: all three"].mean == 0.5
    assert kept.rows[1].paper["ACC-F"] == 0.474


def test_what_is_there_is_made_again_where_it_is_of_something_else(
    trained, runs, scored, tiny_bundle, tmp_path
):
    page = tmp_path / "page.md"
    for games, seed, new in ((3, 0, 7), (3, 0, 0), (4, 0, 7), (4, 5, 7)):
        scored.clear()
        ablations.main(trained, games=games, seed=seed, page=page, rows=page.with_suffix(".json"))
        assert len(scored) == new
    assert len(runs) == 6
    runs.clear()
    scored.clear()
    (trained / "dit" / "model").unlink()
    make_bundle(trained / "dit" / "model", Bundle.open(tiny_bundle).protocol, seed=1)
    ablations.main(trained, games=4, seed=5, page=page, rows=page.with_suffix(".json"))
    assert [Path(value(words, "--out")).parent.name for words in runs] == [
        "random-instead-of-first-frame",
        "no-warm-up",
    ]  # the stub gives the same warm-up as before, of which the decoders are
    assert scored == []
    (trained / "adapt" / "model").unlink()
    (trained / "adapt" / "model").symlink_to(trained / "dit" / "model")
    ablations.main(trained, games=4, seed=5, page=page, rows=page.with_suffix(".json"))
    assert scored == ["whole game", "window of 1"]
    runs.clear()
    write_run_config(trained, "decoder", 20, recipe={"steps": 12})
    ablations.main(trained, games=4, seed=5, page=page, rows=page.with_suffix(".json"))
    assert len(runs) == 3
    assert all(words[1] == "decoder" and value(words, "--steps") == "12" for words in runs)
    assert "fields that the recipe had not" in page.read_text()


def test_equal_steps_for_every_row(trained, runs, scored, tmp_path):
    page = tmp_path / "page.md"
    ablations.main(trained, games=3, page=page, rows=page.with_suffix(".json"))
    runs.clear()
    scored.clear()
    ablations.main(trained, games=3, steps=7, page=page, rows=page.with_suffix(".json"))
    assert scored == [row.name for row in ablations.DECODER]
    decoders = [words for words in runs if words[1] == "decoder"]
    assert [value(words, "--steps") for words in decoders] == ["7"] * 4
    assert value(decoders[0], "--model") == str(trained / "warmup" / "model")
    assert [value(w, "--steps") for w in runs if w[1] == "warmup" and "--steps" in w] == ["1"]
    text = page.read_text()
    assert "toy_ablations.py out/toy --steps 7`" in text
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
    with pytest.raises(UserError, match="stopped before its end: the same command goes on"):
        ablations.train_row(row, trained, home=home)
    assert (out / "checkpoints").exists()
    (out / "checkpoints").rmdir()
    monkeypatch.setattr(ablations, "_run", whole)
    assert ablations.train_row(row, trained, home=home) == out / "model"
    assert not (out / "checkpoints").exists()


def test_a_recipe_whose_field_there_is_no_more(trained):
    write_run_config(trained, "decoder", 20, recipe={"steps": 5, "spin": 1})
    with pytest.raises(UserError, match="decoder: its recipe has spin, which recipes have no more"):
        stages.recipe_options(trained, "decoder")


@pytest.fixture
def child(tmp_path, monkeypatch) -> Path:
    """In place of the interpreter: notes its flags and words; `--wait`: until a signal."""
    stub = tmp_path / "python"
    stub.write_text(
        f"#!{sys.executable}\n"
        "import json, os, pathlib, signal, sys, time\n"
        f"told = pathlib.Path({str(tmp_path)!r})\n"
        "def stop(number, frame):\n"
        "    (told / 'saved').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "(told / 'flags').write_text(os.environ['XLA_FLAGS'])\n"
        "if '--wait' in sys.argv:\n"
        "    (told / 'ready').touch()\n"
        "    time.sleep(60)\n"
        "sys.exit('--fail' in sys.argv)\n"
    )
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    return tmp_path


def test_a_training_has_the_devices_of_train_toy(child, monkeypatch):
    script = (ROOT / "scripts" / "train_toy.sh").read_text()
    named = re.search(r"^DEVICES=(.*)\$\{CORES:-(\d+)\}$", script, re.M)
    assert named
    monkeypatch.delenv("CORES", raising=False)
    ablations._run("train", "decoder")
    assert (child / "flags").read_text().split()[0] == named[1] + named[2]
    monkeypatch.setenv("CORES", "5")
    ablations._run("train", "decoder")
    assert (child / "flags").read_text() == f"{named[1]}5 {os.environ['XLA_FLAGS']}"
    ablations._run("data", "features")
    assert (child / "flags").read_text() == os.environ["XLA_FLAGS"]
    with pytest.raises(UserError, match="animegamer train decoder: left with status 1"):
        ablations._run("train", "decoder", "--fail")


def test_a_sigterm_reaches_the_training(child):
    def stop() -> None:
        while not (child / "ready").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(UserError, match="SIGTERM: stopped: the same command goes on"):
        ablations._run("train", "decoder", "--wait")
    thread.join()
    assert (child / "saved").exists()


def test_the_table_of_ablations():
    rows, reports = ablations.DECODER, {}
    for number, row in enumerate(rows):
        scores = dict.fromkeys(ablations._COLUMNS, estimate(0.9 - 0.1 * number, within=0.1))
        reports[row.name] = {"all_turns": scores}
    lines = ablations.describe(rows, reports, context=False)
    assert len(lines) == 2 + len(rows)
    assert lines[2].startswith("| decoder alone | 0.900 (0.8672) | 0.900 (0.729) | 0.900 (0.403) |")
    signs = ablations.judge_signs(rows, reports)
    assert len(signs) == len(rows) - 1
    assert "CLIP-I -0.100 (-0.023), within noise" in signs[0]
    assert "CLIP-I -0.200 (-0.037), as in the paper" in signs[1]
    assert "MAE-F -0.200 (+0.055), NOT as in the paper" in signs[1]


def test_an_interval_of_a_difference():
    one, other = {"mean": 0.5, "low": 0.2, "high": 0.7}, {"mean": 0.9, "low": 0.8, "high": 1.3}
    found = ablations.difference(one, other)
    assert found == pytest.approx((-0.4, -0.4 - 0.5, -0.4 + np.hypot(0.2, 0.1)))
