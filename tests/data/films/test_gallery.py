"""The page of a shots folder and of a game dataset, opened in a real browser."""

import io
import itertools
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from annotated_shots import Take, annotate, film_name, label, make_shots
from browser import open_browser, open_page
from etils import epath
from PIL import Image
from real_films import big_buck_bunny as big_buck_bunny
from real_films import bikes as bikes
from tiny_sets import turns_of, write_games

from animegamer_jax.cli import main
from animegamer_jax.data.films import gallery
from animegamer_jax.data.films.clips.store import SkippedFilm
from animegamer_jax.data.films.cutting.video_reader import open_film
from animegamer_jax.data.films.gallery import PageFiles, default_page, make_page
from animegamer_jax.data.films.games.grouping import GamesSettings
from animegamer_jax.data.films.games.writer import write_film_games
from animegamer_jax.errors import UserError
from animegamer_jax.media.video import encode_mp4

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


PLAYS = """async article => {
    article.querySelector(".shot").dispatchEvent(new PointerEvent("pointerenter"));
    const video = article.querySelector("video");
    await new Promise(done => setTimeout(done, 400));
    return [video.videoWidth, video.currentTime > 0, video.muted];
}"""


def names(page) -> list[str]:
    """Which clips are on the page, in their order, by their number in the film."""
    articles = page.locator("#clips article").all()
    texts = [article.inner_text().split("\n") for article in articles]
    return [next(line for line in lines if film_name(0) in line).split(", ")[1] for lines in texts]


def test_a_shots_folder_in_a_browser(browser, page_file):
    with open_page(browser, page_file.as_uri()) as (page, wrong):
        assert page.title() == "shots"
        clips = page.locator("#clips article")
        assert names(page) == ["0", "1", "2", "3", "4", "5"]
        reported = clips.nth(1).inner_text()
        for word in (f"{film_name(0)}, 1", "5.00 pixels, level 3", "riding a bicycle 1", "Ren"):
            assert word in reported
        assert page.locator("video").count() == 0, "no clip is loaded before it is looked at"
        for number in (0, 1, 3):
            assert clips.nth(number).evaluate(PLAYS) == [24, True, True]
        clips.nth(3).locator(".shot").dispatch_event("pointerleave")
        assert page.locator("video").count() == 2
        pictures = page.locator("figure img")
        assert pictures.count() == 2  # black and credits, one of each
        for picture in pictures.all():
            assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 12
        texts = [text.replace("\n", " ") for text in page.locator("figure").all_inner_texts()]
        assert ["black" in texts[0], "2 dropped" in texts[0]] == [True, True]
        aside = page.locator("section", has_text="not a film").inner_text()
        assert EVIL in aside
        assert f"{film_name(0)}, clip 3" in aside
        levels = page.locator("[data-histogram^='motion level by flow']").inner_text().split()
        assert levels[levels.index("1") :] == ["1", "1", "3", "1", "5", "1"]
        curve = clips.nth(3).locator("svg.curve")
        assert len(curve.locator("polyline").get_attribute("points").split()) == 4
        assert curve.locator("text").all_text_contents() == [
            "50.0", "0", "0 s", "pixels per frame", "0.6 s"
        ]  # fmt: skip
        assert wrong == []


def test_clips_are_filtered_sorted_and_searched(browser, page_file):
    with open_page(browser, page_file.as_uri()) as (page, wrong):
        page.select_option("[name=level]", "3")
        assert names(page) == ["1"]
        assert page.inner_text("#count").startswith("1 of 6 clips here; the folder has 3 kept")
        page.select_option("[name=level]", "")
        page.select_option("[name=character]", "Mika")
        assert names(page) == ["0"]
        page.click("#all")
        page.select_option("[name=dropped]", "black")
        assert names(page) == ["2", "5"]
        assert page.locator("#clips .shot").count() == 0, "what was dropped has no clip"
        page.select_option("[name=dropped]", "none")
        page.select_option("[name=sort]", "fast")
        assert names(page) == ["3", "1", "0"]
        page.select_option("[name=sort]", "slow")
        assert names(page) == ["0", "1", "3"]
        page.click("#all")
        page.fill("[name=search]", "RIDING ren")
        assert names(page) == ["1"]
        page.fill("[name=search]", "")
        page.check("[name=rows]")
        assert page.locator("section.row h3").all_inner_texts() == [film_name(0)]
        assert wrong == []


def test_a_bar_leads_to_its_clips(browser, page_file):
    with open_page(browser, page_file.as_uri()) as (page, wrong):
        page.click("[data-histogram^='motion level by flow'] a >> text=5")
        assert names(page) == ["3"]
        assert page.input_value("[name=level]") == "5"
        assert page.locator("#clips").evaluate("e => e.getBoundingClientRect().top") < 700
        address = page.url
        page.click("#all")
        page.click("[data-histogram=motion] a >> text=riding a bicycle 0")
        assert names(page) == ["0"]
        page.click("#chips button")  # no list has it: it is taken away here
        assert len(names(page)) == 6
        assert wrong == []
    with open_page(browser, address) as (page, wrong):  # a link to send to others
        assert names(page) == ["3"]
        assert wrong == []


def test_the_page_is_small_and_runs_only_its_own_script(browser, page_file):
    files = page_file.parent / "shots_files"
    assert len(page_file.read_bytes()) < 60_000
    assert sorted(path.suffix for path in files.iterdir()) == [".jpg"] * 8 + [".mp4"] * 3
    with open_page(browser, page_file.as_uri()) as (page, wrong):
        page.evaluate("""() => {
            const script = document.createElement("script");
            script.textContent = "document.title = 'foreign'";
            document.body.append(script);
        }""")
        assert page.title() == "shots"
        assert any("Content Security Policy" in line for line in wrong)


LOAD_ALL = """images => Promise.all(images.map(image => {
    image.loading = "eager";
    return image.decode();
}))"""


def full_size_clip(film: Path) -> bytes:
    """Two seconds of a real film, as `data films` keeps them."""
    with open_film(film, name=film.name) as reader:
        frames = [f.rgb(height=480, width=720) for f in itertools.islice(reader.frames(), 0, 51, 3)]
    return encode_mp4(np.stack(frames))


def test_a_page_of_real_clips_is_below_5_megabytes(browser, tmp_path, big_buck_bunny, bikes):
    """With every picture, though the browser loads those that are far away only when needed."""
    clips = [full_size_clip(film) for film in (big_buck_bunny, bikes)]
    shots = make_shots(tmp_path / "shots", [[Take(value=n / 3) for n in range(120)]], clips=clips)
    assert main(["data", "show", str(shots.path)]) == 0
    with open_page(browser, "about:blank") as (page, wrong):
        asked: set[str] = set()
        page.on("request", lambda request: asked.add(unquote(urlsplit(request.url).path)))
        page.goto((tmp_path / "shots.html").as_uri())
        images = page.locator("#clips img")
        assert images.count() >= 96
        at_once = len(asked)
        images.evaluate_all(LOAD_ALL)
        assert at_once < len(asked) == images.count() + 1, "the page and each picture"
        assert sum(Path(path).stat().st_size for path in asked) < 5_000_000
        width, plays, _ = page.locator("#clips article").nth(7).evaluate(PLAYS)
        assert (width, plays) == (720, True)
        (clip,) = (path for path in asked if path.endswith(".mp4"))
        assert Path(clip).read_bytes() in clips
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
        assert page.locator("article").count() == 5, "whole games"
        first = next(iter(turns_of(1)))
        reported = page.locator("article").first.inner_text()
        assert "train: game 0, turn 1 of 5" in reported
        assert first["instruction"].strip() in reported
        assert "5 of 5 clips here; the dataset has 15 turns" in page.inner_text("body")
        splits = page.locator("[data-histogram='turns of each split']").inner_text().split()
        assert splits[-4:] == ["train", "10", "test", "5"]
        # Its clips are lossless, which browsers do not play: the page has them in another coding.
        width, plays, _ = page.locator("article").first.evaluate(PLAYS)
        assert (width, plays) == (360, True)
        assert wrong == []


def test_the_turns_of_a_game_are_in_a_row(browser, tmp_path):
    games = write_games(tmp_path / "games", {"train": 2, "test": 1})
    assert main(["data", "show", str(games)]) == 0
    with open_page(browser, (tmp_path / "games.html").as_uri()) as (page, wrong):
        page.check("[name=rows]")
        rows = page.locator("section.row")
        assert rows.locator("h3").all_inner_texts() == [
            "train: game 0", "train: game 1", "test: game 2"
        ]  # fmt: skip
        turns = [f"train: game 1, turn {n} of 5" for n in range(1, 6)]
        texts = rows.nth(1).locator("article").all_inner_texts()
        assert [turn in text for turn, text in zip(turns, texts, strict=True)] == [True] * 5
        tops = (
            rows.nth(1)
            .locator("article")
            .evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
        )
        assert len(set(tops)) == 1
        assert wrong == []


def test_of_a_large_dataset_some_turns_are_counted(tmp_path, monkeypatch):
    games = write_games(tmp_path / "games", {"train": 2, "test": 1})
    files = PageFiles(epath.Path(tmp_path))
    assert "counts except the splits" not in make_page(games, files, clips=0)
    monkeypatch.setattr(gallery, "_MAX_COUNTED", 6)
    assert "counts except the splits&#39; are of 6 turns, evenly spread" in make_page(
        games, files, clips=0
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
            assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 12
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
            make_page(tmp_path / "games", PageFiles(epath.Path(tmp_path)))


def test_what_is_no_dataset(tmp_path, shots):
    with pytest.raises(
        UserError, match=r"expected a shots folder \(shots.json\) or a game dataset"
    ):
        make_page(tmp_path, PageFiles(epath.Path(tmp_path)))
    with pytest.raises(UserError, match="clips -1: expected 0 or more"):
        make_page(shots.path, PageFiles(epath.Path(tmp_path)), clips=-1)


def test_reading_films_shows_its_progress(shots, tmp_path):
    seen = []
    files = PageFiles(epath.Path(tmp_path))
    make_page(shots.path, files, clips=0, on_progress=lambda *now: seen.append(now))
    assert seen == [("films read", 0, 1), ("films read", 1, 1), ("clips", 0, 0)]


def test_an_empty_folder(tmp_path):
    folder = make_shots(tmp_path / "shots", [])
    assert "Shots of 0 films" in make_page(folder.path, PageFiles(epath.Path(tmp_path)))


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
