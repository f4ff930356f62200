"""The page of a shots folder and of a game dataset, opened in a real browser."""

import io

import numpy as np
import pytest
from annotated_shots import Take, annotate, film_name, label, make_shots
from browser import open_browser, open_page
from PIL import Image
from tiny_sets import turns_of, write_games

from animegamer_jax.cli import main
from animegamer_jax.data.films import gallery
from animegamer_jax.data.films.clips.store import SkippedFilm
from animegamer_jax.data.films.gallery import default_page, make_page
from animegamer_jax.data.films.games.grouping import GamesSettings
from animegamer_jax.data.films.games.writer import write_film_games
from animegamer_jax.errors import UserError

EVIL = '<img src=x onerror="document.title=1">'


def a_picture() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 12, 3), 99, np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def shots(tmp_path_factory):
    takes = [
        Take(value=0.3), Take(value=5.0), Take(dropped="black"), Take(value=50.0),
        Take(dropped="credits"), Take(dropped="black"),
    ]  # fmt: skip
    folder = make_shots(tmp_path_factory.mktemp("films") / "shots", [takes], picture=a_picture())
    annotate(folder, 0, [label(0), label(1)], aside=[3])
    folder.skip(SkippedFilm(film="bad-00000000", name=f"{EVIL}.mp4", reason="not a film"))
    return folder


@pytest.fixture(scope="module")
def page_file(shots):
    assert main(["data", "show", str(shots.path)]) == 0
    return shots.path.parent / "shots.html"


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


def test_a_shots_folder_in_a_browser(browser, page_file):
    with open_page(browser, page_file.as_uri()) as (page, wrong):
        assert page.title() == "shots"
        clips = page.locator("article")
        assert clips.count() == 3
        reported = clips.nth(1).inner_text()
        for word in (f"{film_name(0)}, 1", "5.00 pixels, level 3", "riding a bicycle 1", "Ren"):
            assert word in reported
        plays = """async video => {
            await video.play(); await new Promise(done => setTimeout(done, 300));
            return [video.videoWidth, video.currentTime > 0];
        }"""
        for video in page.locator("video").all():
            assert video.evaluate(plays) == [24, True]
        pictures = page.locator("figure img")
        assert pictures.count() == 2  # black and credits, one of each
        for picture in pictures.all():
            assert picture.evaluate("image => image.complete && image.naturalWidth") == 12
        texts = [text.replace("\n", " ") for text in page.locator("figure").all_inner_texts()]
        assert ["black" in texts[0], "2 dropped" in texts[0]] == [True, True]
        aside = page.locator("section", has_text="not a film").inner_text()
        assert EVIL in aside
        assert f"{film_name(0)}, clip 3" in aside
        levels = page.locator("[data-histogram^='motion level by flow']").inner_text().split()
        assert levels[levels.index("1") :] == ["1", "1", "3", "1", "5", "1"]
        points = clips.nth(2).locator("polyline").get_attribute("points").split()
        assert len(points) == 4
        assert wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser, page_file, scheme):
    size = {"width": 380, "height": 800}
    with open_page(browser, page_file.as_uri(), viewport=size, color_scheme=scheme) as (page, _):
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        style = "getComputedStyle(document.body)"
        assert page.evaluate(f"{style}.color") != page.evaluate(f"{style}.backgroundColor")


def test_a_game_dataset_in_a_browser(browser, tmp_path):
    games = write_games(tmp_path / "games", {"train": 2, "test": 1})
    out = tmp_path / "page.html"
    assert main(["data", "show", str(games), "--out", str(out), "--clips", "4"]) == 0
    with open_page(browser, out.as_uri()) as (page, wrong):
        assert page.locator("article").count() == 4
        first = next(iter(turns_of(1)))
        reported = page.locator("article").first.inner_text()
        assert "train: game 0, turn 1 of 5" in reported
        assert first["instruction"].strip() in reported
        assert "4 of 15, evenly spread" in page.inner_text("body")
        splits = page.locator("[data-histogram='turns of each split']").inner_text().split()
        assert splits[-4:] == ["train", "10", "test", "5"]
        # Its clips are lossless, which browsers do not play: the page has them in another coding.
        assert (
            page.locator("video").first.evaluate(
                "async video => { await video.play(); return video.videoHeight; }"
            )
            == 240
        )
        assert wrong == []


def test_of_a_large_dataset_some_turns_are_counted(tmp_path, monkeypatch):
    games = write_games(tmp_path / "games", {"train": 2, "test": 1})
    assert "counts except the splits" not in make_page(games, clips=0)
    monkeypatch.setattr(gallery, "_MAX_COUNTED", 6)
    assert "counts except the splits&#39; are of 6 turns, evenly spread" in make_page(
        games, clips=0
    )


def test_what_films_dropped_in_a_browser(browser, tmp_path):
    takes = [Take(scene=n, start=9.0 * n) for n in range(4)]
    takes += [Take(dropped="still"), Take(dropped="black"), Take(dropped="still")]
    folder = make_shots(tmp_path / "shots", [takes], picture=a_picture())
    annotate(folder, 0, [label(number) for number in range(3)])
    write_film_games(tmp_path / "games", folder, GamesSettings())
    out = tmp_path / "page.html"
    assert main(["data", "show", str(tmp_path / "games"), "--out", str(out)]) == 0
    with open_page(browser, out.as_uri()) as (page, wrong):
        texts = [text.replace("\n", " ") for text in page.locator("figure").all_inner_texts()]
        assert [text.split()[:3] for text in texts] == [
            ["still", "2", "dropped;"],
            ["black", "1", "dropped;"],
        ]
        assert all(film_name(0) in text for text in texts)
        for picture in page.locator("figure img").all():
            assert picture.evaluate("image => image.complete && image.naturalWidth") == 12
        dropped = page.locator("[data-histogram='clips dropped']").inner_text().split()
        assert dropped[-4:] == ["still", "2", "black", "1"]
        unused = page.locator("[data-histogram='clips unused']").inner_text().split()
        assert unused[-3:] == ["not", "annotated", "1"]
        assert wrong == []
    card = tmp_path / "games" / "card.json"
    errors = {"{": "not valid JSON", "{}": "not a dataset", "[]": "expected an object"}
    for content, error in errors.items():
        card.write_text(content)
        with pytest.raises(UserError, match=rf"card\.json: {error}"):
            make_page(tmp_path / "games")


def test_what_is_no_dataset(tmp_path, shots):
    with pytest.raises(
        UserError, match=r"expected a shots folder \(shots.json\) or a game dataset"
    ):
        make_page(tmp_path)
    with pytest.raises(UserError, match="clips -1: expected 0 or more"):
        make_page(shots.path, clips=-1)


def test_an_empty_folder(tmp_path):
    folder = make_shots(tmp_path / "shots", [])
    assert "Shots of 0 films" in make_page(folder.path)


def test_where_the_page_goes(tmp_path, shots, monkeypatch, capsys):
    monkeypatch.chdir(shots.path)
    assert default_page(".") == shots.path.parent / "shots.html"
    assert default_page(f"{shots.path}/") == shots.path.parent / "shots.html"
    monkeypatch.chdir(tmp_path)
    assert default_page("gs://bucket/some/shots/") == tmp_path / "shots.html"
    (tmp_path / "file").write_text("")
    for out, reason in (
        (tmp_path / "nothing" / "x.html", "No such file or directory"),
        (tmp_path / "file" / "x.html", "Not a directory"),
        (tmp_path, "Is a directory"),
    ):
        assert main(["data", "show", str(shots.path), "--out", str(out), "--clips", "0"]) == 2
        reported = capsys.readouterr().err
        assert f"{out}: cannot be written: {reason}: choose another file by --out\n" in reported
        assert reported.count("\n") == 1
