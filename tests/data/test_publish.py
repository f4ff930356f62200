"""`animegamer publish`: models and datasets as folders for a hub, with cards, and uploaded."""

import pytest
from stand_in_hub import using_hub
from tiny_sets import write_features_set, write_games

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.cli import main
from animegamer_jax.data.datasets import open_games


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with using_hub(monkeypatch, tmp_path / "cache") as found:
        yield found


def publish(capsys, *words: object) -> tuple[int, str, str]:
    """Status, standard output, and standard error."""
    status = main(["publish", "--licence", "cc-by-4.0", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out.strip(), err.strip()


def test_a_game_dataset_opens_from_its_folder_and_has_a_card(tmp_path, capsys):
    data = write_games(tmp_path / "games", {"train": 3, "test": 1})
    (data / "README.md").write_text("# Drawn by us")
    status, out, _ = publish(capsys, "--data", data, "--out", tmp_path / "public")
    assert (status, out) == (0, str(tmp_path / "public"))
    expected, found = open_games(data), open_games(tmp_path / "public")
    assert found.info == expected.info
    assert len(found.turns("train")) == len(expected.turns("train")) > 0
    card = (tmp_path / "public" / "README.md").read_text()
    assert card.startswith("---\nlicense: cc-by-4.0\n")
    assert f"| train | {len(found.turns('train')):,} |" in card
    assert "where the films come from, who holds their rights" in card
    assert card.endswith("# Drawn by us")


def test_a_feature_dataset_is_uploaded_to_a_branch(tmp_path, capsys, hub):
    data = write_features_set(tmp_path / "features", 2)
    words = ("--data", data, "--repo", "me/features", "--revision", "new", "--public")
    status, out, err = publish(capsys, *words)
    assert status == 0, err
    assert out.startswith(f"{hub.url}/me/features/commit/")
    assert hub.created[0]["type"] == "dataset"
    assert hub.created[0].get("visibility") != "private"
    files = hub.commits[hub.branches["datasets", "me/features", "new"]]
    assert files["set.json"] == (data / "set.json").read_bytes()
    assert b"A dataset of features" in files["README.md"]


def test_a_model_plays_from_its_folder(tiny_bundle, tmp_path, capsys):
    status, out, _ = publish(capsys, "--model", tiny_bundle, "--out", tmp_path / "public")
    assert (status, out) == (0, str(tmp_path / "public"))
    assert Bundle.open(tmp_path / "public").digest() == Bundle.open(tiny_bundle).digest()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "out"], "expected --model or --data, and not both"),
        (["--model", "toy", "--data", ".", "--out", "out"], "expected --model or --data, and not"),
        (["--model", "toy"], "expected --out, a folder to write, or --repo"),
        (["--data", "nowhere", "--out", "out"], "nowhere"),
        (["--model", "toy", "--out", "."], "already there"),
    ],
)
def test_what_cannot_be_published(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, err = publish(capsys, *words)
    assert (status, out) == (2, "")
    assert message in err
    assert "\n" not in err
    assert not (tmp_path / "out").exists()
