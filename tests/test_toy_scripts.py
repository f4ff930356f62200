"""The scripts around the embedded model: putting it into the package, the table of ablations."""

import json
from pathlib import Path

import embed_toy
import jax.numpy as jnp
import numpy as np
import pytest
import toy_ablations

from animegamer_jax.bundle import Bundle
from animegamer_jax.errors import UserError


def estimate(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean, "high": mean, "count": 10}


def report(*, split: str = "test", window: int | None = None, score: float = 0.5) -> dict:
    tables = {
        table: dict.fromkeys(rows, estimate(score)) for table, rows in embed_toy._SHOWN.items()
    }
    settings = {"split": split, "window": window, "games": 100, "turns": 5, "steps": 50}
    return {"settings": settings | {"first_seed": 0}, **tables}


@pytest.fixture
def trained(tiny_bundle, tmp_path) -> Path:
    """What the training leaves, as far as the script reads it."""
    folder = tmp_path / "toy"
    for stage in embed_toy.STAGES:
        for step in (2, 10):
            about = folder / stage / "checkpoints" / str(step) / "about" / "metadata"
            about.parent.mkdir(parents=True)
            recipe = {"steps": step * 1000, "batch_size": 4, "dtype": "float32", "seed": 7}
            about.write_text(
                json.dumps({"recipe": recipe | {"optimizer": {"learning_rate": 1e-3}}})
            )
    (folder / "adapt" / "model").symlink_to(Path(tiny_bundle).absolute())
    return folder


def test_a_model_is_embedded_with_its_card(trained, tiny_bundle, tmp_path):
    paths = []
    for number, found in enumerate([report(score=0.25), report(split="phrasings", window=1)]):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(found))
    out = tmp_path / "assets" / "toy"
    embed_toy.main(trained, scores=tuple(paths), out=out)
    before, after = Bundle.open(tiny_bundle), Bundle.open(out)
    assert after.name == "toy"
    assert after.protocol == before.protocol
    assert after.info.stages == before.info.stages
    for name in ("mllm", "dit", "vae", "encoder"):
        assert getattr(after.config, name).param_dtype == "bfloat16"
        assert getattr(after.config, name).dtype == "float32"
        for path in before.leaves(name):
            expected = np.asarray(before.read(name, path)).astype(jnp.bfloat16)
            np.testing.assert_array_equal(np.asarray(after.read(name, path)), expected)
    assert after.tokenizer_dir.exists()
    texts = [*out.rglob("*.txt"), *out.rglob("*.json")]
    assert not any(str(tmp_path) in path.read_text() for path in texts)
    card = (out / "README.md").read_text()
    assert "| vae | 10,000 | 4 | 0.001 | float32 | 7 |" in card
    assert "| score | test | phrasings, window 1 |" in card
    assert "| ACC-F | 0.250 | 0.500 |" in card


def test_what_cannot_be_embedded(trained, tmp_path, monkeypatch):
    score = tmp_path / "scores.json"
    score.write_text(json.dumps(report()))
    monkeypatch.setattr(embed_toy, "_MOST_BYTES", 10)
    with pytest.raises(UserError, match="expected at most 10 bytes, found"):
        embed_toy.main(trained, scores=(score,), out=tmp_path / "out")
    for path in (trained / "mllm" / "checkpoints").rglob("metadata"):
        path.unlink()
    with pytest.raises(UserError, match=r"mllm: expected the stage's checkpoints, found none"):
        embed_toy.main(trained, scores=(score,), out=tmp_path / "out")


def test_the_table_of_ablations():
    rows, reports = toy_ablations.DECODER, {}
    for number, row in enumerate(rows):
        scores = dict.fromkeys(toy_ablations._COLUMNS, estimate(0.9 - 0.1 * number))
        reports[row.name] = {"all_turns": scores}
    lines = toy_ablations.describe(rows, reports, context=False)
    assert len(lines) == 2 + len(rows)
    assert lines[2].startswith("| decoder alone | 0.900 (0.8672) | 0.900 (0.729) | 0.900 (0.403) |")
    signs = toy_ablations.judge_signs(rows, reports)
    assert len(signs) == len(rows) - 1
    assert "CLIP-I -0.100 (-0.023), as in the paper" in signs[0]
    assert "MAE-F -0.100 (+0.159), NOT as in the paper" in signs[0]


def test_the_page_of_ablations(tmp_path):
    reports = {}
    for row in (*toy_ablations.DECODER, *toy_ablations.GAME):
        names = (*toy_ablations._COLUMNS, "ACC-S", "all three")
        scores = dict.fromkeys(names, estimate(0.5))
        reports[row.name] = {"all_turns": scores, "open_turns": scores}
    page = tmp_path / "page.md"
    toy_ablations.write_table(page, reports, games=3, seed=4)
    text = page.read_text()
    assert "seeds 4 to 6" in text
    assert "| window of 1 | 0.500 |" in text
    assert text.count("\n| ") == 2 + len(toy_ablations.DECODER) + len(toy_ablations.GAME)
