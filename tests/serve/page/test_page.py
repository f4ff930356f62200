"""The page in a real browser, with a player without networks behind it.

Pictures of the page, with the embedded model, go to the folder that SCREENSHOTS names
(`make screenshots`).
"""

import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from browser import open_page
from page_games import (
    ENDED,
    PHONE,
    SECONDS,
    STILL,
    WIDE,
    begin,
    caption,
    count_turns,
    expect,
    is_playing,
    of_server,
    ready,
    say,
)
from PIL import Image
from served import serving, serving_fake

FIRST_CLIP = 3_000.0  # ms from opening to a playing clip: the aim is 1 s, where nothing else runs


def format_of(download: Any) -> str | None:
    with Image.open(download.path()) as picture:
        return picture.format


WATCH = """() => {
  const videos = [...document.querySelectorAll("#stage video")];
  const isShown = (v) => v.matches(".front, .fading") && v.readyState >= v.HAVE_CURRENT_DATA;
  window.watched = { frames: 0, blank: 0, fronts: [] };
  const look = () => {
    const front = videos.findIndex((video) => video.matches(".front"));
    watched.frames++;
    watched.blank += !videos.some(isShown);
    if (watched.fronts.at(-1) !== front) watched.fronts.push(front);
    requestAnimationFrame(look);
  };
  look();
}"""


def test_two_clicks_to_a_playing_clip(browser, address):
    """A small first visit; no request to another host; no error."""
    sent: list[Any] = []
    with open_page(browser, "about:blank", may_fail=ENDED, **WIDE) as (page, wrong):
        page.set_default_timeout(SECONDS)
        page.on("requestfinished", lambda request: sent.append(request))
        page.goto(address)
        ready(page)
        assert is_playing(page)  # a prepared shot, before the first click
        page.wait_for_timeout(300)
        first = [request for request in sent if request.url.startswith("http")]
        sizes = [request.sizes() for request in first]
        total = sum(size["responseBodySize"] + size["responseHeadersSize"] for size in sizes)
        assert len(first) <= 15, [request.url for request in first]
        assert total < 300_000
        marks = page.evaluate(
            "performance.getEntriesByType('mark').map(m => [m.name, m.startTime])"
        )
        played = next(time for name, time in marks if name.startswith("playing"))
        print(f"the first clip plays {played / 1000:.2f} s after opening")
        assert played < FIRST_CLIP
        page.evaluate(WATCH)
        page.click("[data-name=Ren]")
        page.click("[data-name=forest]")
        caption(page, "Ren · waving · day forest")
        assert is_playing(page)
        expect(page.locator("#day")).to_contain_text("Day 1: 1 of 10")
        # Another clip came, then it looped: the videos took turns, and one was always to be seen.
        for _ in range(100):
            watched = page.evaluate("watched")
            if len(watched["fronts"]) >= 4:
                break
            page.wait_for_timeout(100)
        assert len(watched["fronts"]) >= 4
        assert watched["frames"] > 10
        assert watched["blank"] == 0, watched
        hosts = {request.url.split("/")[2] for request in sent if request.url.startswith("http")}
        assert hosts == {address.split("/")[2]}
        assert wrong == []


def test_a_game_of_which_nothing_is_lost(opened, browser, address):
    page = opened
    begin(page)
    say(page, "Motion: running.", 2)
    caption(page, "running")
    expect(page.locator("#line")).to_have_value("")
    page.click("#suggestions button >> nth=0")
    count_turns(page, 3)
    page.click("#again")
    expect(page.locator("[data-take]")).to_contain_text("take 2/2", timeout=SECONDS)
    page.click("[data-take]")  # walk through the takes
    expect(page.locator("[data-take]")).to_contain_text("take 1/2")
    line = page.locator("#line")
    page.click("#undo")
    count_turns(page, 2)
    expect(line).not_to_have_value("")  # the line is back
    page.click("#undo")
    count_turns(page, 1)
    expect(line).to_have_value("Motion: running.")  # of the turn before
    page.click("#redo")
    count_turns(page, 2)
    expect(line).to_have_value("")
    page.fill("#line", "my own")
    page.click("#redo")
    count_turns(page, 3)
    expect(line).to_have_value("my own")
    page.click("#board .turn >> nth=0")
    caption(page, "turn 1 of 3")
    page.click("#branch")
    count_turns(page, 1)
    expect(page.locator("#board .turn.ahead")).to_have_count(2)
    say(page, "jump", 2)
    page.click("#open-tree")
    expect(page.locator("#tree .turn")).to_have_count(5)
    with page.expect_event("requestfinished", lambda request: request.url.endswith("/go")):
        page.locator("#tree .row").nth(1).locator(".turn").first.click()
    caption(page, "running")
    page.reload()
    ready(page)
    caption(page, "running")
    with open_page(browser, page.url, may_fail=ENDED, **STILL) as (other, wrong):  # a second tab
        other.set_default_timeout(SECONDS)
        caption(other, "running")
        say(other, "In the second tab", 3)
        count_turns(page, 3)
        caption(page, "In the second tab")
        page.click("#undo")
        count_turns(other, 2)
        assert wrong == []
    page.click("#home")
    page.click("#open-games")
    page.click("#games-list .card >> nth=0")
    caption(page, "running")
    page.click("#home")
    begin(page, "Ren", "forest")
    caption(page, "forest")
    page.click("#open-games")  # from one game to another
    page.click("#games-list .card >> nth=1")
    caption(page, "running")
    count_turns(page, 2)
    page.click("#open-games")
    page.click("#games-list .forget >> nth=1")
    expect(page.locator("#games-list .card")).to_have_count(1)
    page.reload()
    page.click("#open-games")
    page.locator("#games-list .card").wait_for()
    expect(page.locator("#games-list .card")).to_have_count(1)


@pytest.mark.slow
def test_ten_turns_and_a_server_that_is_killed_and_comes_back(browser, tmp_path):
    """A line that is sent while the server is away is played once, when it is back."""
    games = tmp_path / "games"
    with (
        serving_fake(games, 4, 0.05) as (address, process),
        open_page(browser, address, may_fail=("http",), **WIDE) as (page, _),
    ):
        page.set_default_timeout(SECONDS)
        ready(page)
        page.click("#open-settings")
        page.uncheck("#rules")
        page.click("#settings .close")
        begin(page)
        for number in range(2, 6):
            say(page, f"turn {number}", number)
        page.click("#board .turn >> nth=1")
        page.click("#branch")
        count_turns(page, 2)
        say(page, "aside", 3)
        page.click("#open-tree")
        page.click("#tree [data-go=turn_005]")
        count_turns(page, 5)
        for number in range(6, 8):
            say(page, f"turn {number}", number)
        process.send_signal(signal.SIGKILL)
        expect(page.locator("#banner")).to_contain_text("The server is away")
        page.fill("#line", "while you were away")
        page.press("#line", "Enter")
        port = int(address.rpartition(":")[2])
        with serving_fake(games, 4, 0.05, port):
            count_turns(page, 8)
            caption(page, "while you were away")
            expect(page.locator("#banner")).to_be_hidden()
            with open_page(browser, page.url, may_fail=("http",), **WIDE) as (other, _):
                other.set_default_timeout(SECONDS)
                ready(other)
                say(other, "nine", 9)
                count_turns(page, 9)
            page.click("#again")
            page.locator("[data-take]").wait_for()
            page.click("#undo")
            count_turns(page, 8)
            page.fill("#line", "")
            page.reload()
            ready(page)
            say(page, "ten", 9)
            say(page, "eleven", 10)
            name = page.url.partition("game=")[2]
            document = json.loads((games / name / "game.json").read_text())
            played = [turn["instruction"] for turn in document["turns"]]
            numbers = [f"turn {number}" for number in range(2, 8)]
            assert played[1:] == [*numbers, "while you were away", "ten", "eleven"]
            aside = [other["turn"]["instruction"] for other in document["others"]]
            assert sorted(aside) == ["aside", "nine", "nine"]
            page.reload()
            ready(page)
            count_turns(page, 10)
            page.click("#open-tree")
            expect(page.locator("#tree [data-go]")).to_have_count(13)
            clips = page.locator("#tree [data-go]").evaluate_all(
                "all => all.map(b => b.dataset.go)"
            )
            for clip in clips:  # of a branch as well, after the restart
                found = f"{address}/api/v1/games/{name}/clips/{clip}.mp4"
                with urllib.request.urlopen(found) as answer:
                    assert answer.read(8)[4:] == b"ftyp"


def test_nobody_types_into_a_void(opened):
    page = opened
    begin(page)
    page.fill("#line", "xaruto xeats on the xoon")
    expect(page.locator("#marks mark")).to_have_count(3)
    assert page.locator("#marks mark").all_inner_texts() == ["xaruto", "xeats", "xoon"]
    page.press("#line", "Enter")
    expect(page.locator("#reading")).to_contain_text("The model knows no word of this line")
    count_turns(page, 1)
    page.click("#reading [data-word=town]")
    assert page.input_value("#line") == "xaruto xeats on the town"
    expect(page.locator("#anyway")).to_have_count(0)
    page.press("#line", "Enter")
    count_turns(page, 2)
    caption(page, "not known: xaruto, xeats")
    page.press("#line", "Enter")
    expect(page.locator("#status")).to_have_text("Say what happens next.")


def test_a_game_from_a_picture(opened, tmp_path):
    page = opened
    Image.new("RGB", (48, 32), "red").save(tmp_path / "hero.png")
    page.click("#own-picture")
    page.click("#picture-form .primary")
    expect(page.locator("#picture-error")).to_have_text("Choose a picture first.")
    page.set_input_files("#picture-file", str(tmp_path / "hero.png"))
    page.click("#picture-form .primary")
    expect(page.locator("#picture-error")).to_contain_text("Say in a text who is in the picture")
    page.fill("#picture-text", "xwaving")  # is held back, as a line is
    page.click("#picture-form .primary")
    expect(page.locator("#picture-reading #begin-anyway")).to_be_visible()
    expect(page.locator("#picture-marks mark")).to_have_text("xwaving")
    expect(page.locator("#picture-error")).to_be_empty()
    page.click("#picture-reading [data-word=waving]")
    expect(page.locator("#begin-anyway")).to_have_count(0)
    page.fill("#picture-text", "Character: Hana; Motion: waving.")
    page.route("**/games/picture", lambda route: (page.wait_for_timeout(400), route.continue_()))
    with page.expect_request("**/games/picture"):
        page.dblclick("#picture-form .primary")
    expect(page.locator("#picture-status")).to_contain_text("Reading your picture")
    caption(page, "The game starts from your picture")
    assert page.evaluate("JSON.parse(localStorage['animegamer.games']).length") == 1
    expect(page.locator("#still")).to_be_visible()
    say(page, "running", 1)
    expect(page.locator("#still")).to_be_hidden()


def test_a_double_click_begins_one_game(opened):
    """It chooses no place in whose spot the character was, and no second game."""
    page = opened
    page.dblclick("[data-name=Mika]")
    expect(page.locator("#question")).to_have_text("Where does Mika begin?")
    page.dblclick("[data-name=beach]")
    count_turns(page, 1)
    page.wait_for_timeout(200)
    assert page.evaluate("JSON.parse(localStorage['animegamer.games']).length") == 1


def test_a_day_has_an_end(opened):
    page = opened
    begin(page)
    page.click("#open-meters")
    page.fill("#set-stamina", "0")
    expect(page.locator("[data-meter=stamina]")).to_contain_text("+5")
    page.click("#edit .primary")
    expect(page.locator("[data-meter=stamina]")).to_have_text(
        "Stamina0"
    )  # the turn's change is void
    expect(page.locator("#ending-title")).to_contain_text("Mika has no stamina left")
    expect(page.locator("#ending-card")).to_be_visible(timeout=SECONDS)
    with page.expect_download() as download:
        page.click("#ending-save")
    assert format_of(download.value) == "PNG"
    page.keyboard.press("Escape")  # the day is still over
    expect(page.locator("#suggestions button")).to_have_text(["Next day", "Card of the day"])
    page.fill("#line", "running")
    page.press("#line", "Enter")
    expect(page.locator("#ending")).to_be_visible()
    page.keyboard.press("Escape")
    page.click("#suggestions button >> nth=1")
    expect(page.locator("#ending")).to_be_visible()
    page.keyboard.press("Escape")
    page.click("#suggestions button >> nth=0")
    expect(page.locator("#day")).to_contain_text("Day 2: 0 of 10")
    assert page.get_attribute("[data-meter=stamina]", "data-value") == "50"
    page.click("#open-save")
    page.route("**/film.gif*", lambda route: (page.wait_for_timeout(300), route.continue_()))
    with page.expect_download() as download:
        page.click("#film-gif")
        expect(page.locator("#film-gif")).to_have_text("Making the film …")
    assert format_of(download.value) == "GIF"
    expect(page.locator("#film-gif")).to_have_text("Film (GIF)")
    page.keyboard.press("Escape")
    page.click("#home")
    page.click("#just-type")
    expect(page.locator("#day")).to_contain_text("10 turns for it")
    page.click("#open-save")
    for name in ("film-mp4", "film-gif", "card", "archive"):
        expect(page.locator(f"#{name}")).to_have_css("opacity", "0.45")  # there is no turn


def test_a_turn_is_stopped(browser, tmp_path):
    """By a player that stays in its first step, so that there is always something to stop."""
    with (
        serving_fake(tmp_path / "games", 200) as (address, process),
        open_page(browser, address, may_fail=ENDED) as (page, wrong),
    ):
        page.set_default_timeout(SECONDS)
        ready(page)
        page.click("#open-settings")
        page.fill("#steps", "50")
        page.click("#settings .close")
        begin(page)
        page.fill("#line", "jump")
        page.press("#line", "Enter")
        expect(page.locator("#status")).to_contain_text("of 50", timeout=SECONDS)
        expect(page.locator("#undo")).to_be_disabled()
        away = "away => import('/assets/game.js').then(game => game.setAway(away))"
        page.evaluate(away, True)
        expect(page.locator("#banner")).to_contain_text("The server is away")
        expect(page.locator("#status")).to_be_empty()  # nobody knows how far the turn is
        page.evaluate(away, False)
        expect(page.locator("#status")).to_contain_text("of 50", timeout=SECONDS)
        page.fill("#line", "typed during the turn")
        page.click("#stop")
        expect(page.locator("#status")).to_contain_text("Stopped")
        assert page.input_value("#line") == "typed during the turn"
        count_turns(page, 1)
        page.fill("#line", "jump")
        page.press("#line", "Enter")
        expect(page.locator("#status")).to_contain_text("of 50", timeout=SECONDS)
        with open_page(browser, "about:blank") as (other, _):  # a window that is slower
            other.set_default_timeout(SECONDS)
            other.route("**/events", lambda route: route.abort())
            other.goto(page.url)
            ready(other)
            other.fill("#line", "slower")
            other.press("#line", "Enter")
            other.locator("#status.bad").wait_for()
            other.unroute("**/events")
            process.send_signal(signal.SIGUSR1)
            count_turns(other, 2)
            expect(other.locator("#status")).to_contain_text("Another window has played a turn")
            expect(other.locator("#line")).to_have_value("slower")
        count_turns(page, 2)
        assert wrong == []


def test_a_line_in_parts_with_a_partner(opened):
    page = opened
    begin(page)
    page.click("#open-parts")
    partner = page.locator("#part-partner")
    expect(partner).to_be_hidden()
    page.select_option("#part-motion", "talking to")
    expect(partner).to_have_value("Ren")  # somebody else than Mika
    for part, word in (
        ("character", "Hana"), ("adverb", "gently"), ("partner", "Mika"), ("time", "night"),
        ("place", "forest"),
    ):  # fmt: skip
        page.select_option(f"#part-{part}", word)
    line = "Character: Hana; Motion: gently talking to Mika; Background: night forest."
    expect(page.locator("#line")).to_have_value(line)
    page.click("#play")
    count_turns(page, 2)
    caption(page, "Hana · gently talking to Mika · night forest")
    page.select_option("#part-motion", "running")
    expect(partner).to_be_hidden()
    assert "Mika" not in page.input_value("#line")


def test_a_game_is_kept_and_shared(browser, address, tmp_path):
    """Its film, its link, and its zip, which is loaded again."""
    options = WIDE | STILL | {"permissions": ["clipboard-read", "clipboard-write"]}
    with open_page(browser, address, may_fail=(*ENDED, "film.mp4", "game.zip"), **options) as (
        page,
        wrong,
    ):
        page.set_default_timeout(SECONDS)
        ready(page)
        begin(page)
        say(page, "running", 2)
        page.click("#open-save")
        with page.expect_download() as download:
            page.click("#film-mp4")
        assert Path(download.value.path()).read_bytes()[4:8] == b"ftyp"
        with page.expect_download() as download:
            page.click("#archive")
        kept = tmp_path / "game.zip"
        download.value.save_as(kept)
        page.click("#link")
        expect(page.locator("#link-done")).to_contain_text("copied")
        link = page.evaluate("navigator.clipboard.readText()")
        with open_page(browser, link, may_fail=ENDED, **STILL) as (other, _):
            count_turns(other, 2)
            caption(other, "running")
        page.keyboard.press("Escape")
        page.click("#home")
        expect(page.locator("#start")).to_be_visible()
        page.set_input_files("#load-file", str(kept))
        page.wait_for_url(f"{address}/#game=*")
        assert page.url != link
        count_turns(page, 2)
        caption(page, "running")
        assert wrong == []


def test_the_page_waits_for_a_server_that_is_away(browser, address):
    """It says so, and is built as soon as the first answer comes."""
    with open_page(browser, "about:blank") as (page, _):
        page.set_default_timeout(SECONDS)
        for path in ("assets/lang/en.json", "api/v1/server"):
            page.route(f"{address}/{path}", lambda route: route.abort(), times=1)
        page.goto(address)
        expect(page.locator("#banner")).to_contain_text("The server is away")
        ready(page)
        expect(page.locator("#banner")).to_be_hidden()
        page.locator("[data-name=Mika]").wait_for()


def test_what_players_say_is_never_run(opened):
    page = opened
    said = '<img src=x onerror="window.ran=1"> שלום 🎈 &lt;b&gt;'
    begin(page)
    say(page, said, 2)
    caption(page, said)
    assert page.evaluate("window.ran") is None
    assert page.locator("#caption img, #caption b, #board script").count() == 0


def test_the_page_is_ready_while_the_model_compiles(browser, tmp_path):
    """The first screen says so, a prepared shot plays, and the first turn waits for it."""
    with serving_fake(tmp_path / "games", 4, "--warm-up") as (address, process):
        while of_server(address)["status"] != "warming up":  # it stays in it
            time.sleep(0.05)
        with open_page(browser, address, may_fail=ENDED, **WIDE) as (page, wrong):
            page.set_default_timeout(SECONDS)
            ready(page)
            banner = page.locator("#banner")
            expect(banner).to_contain_text("about a minute")
            red = "b => /rgb.125, 29, 22/.test(getComputedStyle(b).backgroundColor)"
            assert not banner.evaluate(red)
            expect(page.locator("#intro")).to_contain_text("a model draws it")
            assert is_playing(page)
            begin(page)
            page.click("#suggestions button >> nth=0")
            expect(page.locator("#status")).to_contain_text("being prepared")
            expect(page.locator("#stop")).to_be_visible()
            expect(page.locator("#suggestions button").first).to_be_disabled()
            assert of_server(address)["status"] == "warming up"
            count_turns(page, 1)
            process.send_signal(signal.SIGUSR1)
            count_turns(page, 2)
            expect(page.locator("#banner")).to_be_hidden()
            assert wrong == []


@pytest.mark.slow
def test_the_embedded_model_is_played_from_the_start(browser, tmp_path):
    """Two clicks while it compiles, and a turn as soon as it has."""
    with serving(tmp_path / "games", warm_up=True) as (address, _):
        words = of_server(address)["words"]
        with open_page(browser, address, may_fail=ENDED, **WIDE) as (page, wrong):
            page.set_default_timeout(SECONDS)
            ready(page)
            begin(page, words["characters"][0], words["places"][0])
            assert is_playing(page)
            page.click("#suggestions button >> nth=0")
            count_turns(page, 2, timeout=300_000)
            assert is_playing(page)
            assert wrong == []


@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="only for `make screenshots`")
def test_screenshots(browser, tmp_path):
    """Pictures for the docs, of a short game with the embedded model."""
    folder = Path(os.environ["SCREENSHOTS"])
    with serving(tmp_path / "games") as (address, _):
        words = of_server(address)["words"]
        names = words["characters"]
        lines = [
            f"Motion: {words['motions'][1]}; Background: {words['places'][1]}.",
            f"Character: {names[3]}; Background: {words['places'][3]}.",
            f"Character: {names[5]}; Motion: {words['motions'][4]}; "
            f"Background: {words['times'][0]} {words['places'][2]}.",
        ]
        for file, options in (("serve", WIDE), ("serve-phone", PHONE)):
            with open_page(browser, address, may_fail=ENDED, **options) as (page, _):
                page.set_default_timeout(300_000)
                ready(page)
                page.wait_for_timeout(1500)
                if file == "serve":
                    page.screenshot(path=str(folder / "serve-start.png"))
                begin(page, names[1], words["places"][0])
                for number, line in enumerate(lines, start=2):
                    say(page, line, number, timeout=300_000)
                page.wait_for_timeout(2500)
                page.evaluate("scrollTo(0, 0)")
                page.screenshot(path=str(folder / f"{file}.png"))
