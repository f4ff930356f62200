"""The page in a real browser, with a player without networks behind it.

Pictures of the page, with the embedded model, go to the folder that SCREENSHOTS names
(`make screenshots`).
"""

import itertools
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import open_browser, open_page
from PIL import Image
from served import serving, serving_fake

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

# The browser calls streams that the page itself ends failed, and so clips that are replaced.
ENDED = ("/events", "blob:")
WIDE = {"viewport": {"width": 1280, "height": 860}}
STILL = {"reduced_motion": "reduce"}  # a clip that loops is most of a browser's work
PHONE = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True}
TABLET = {"viewport": {"width": 820, "height": 1180}, "has_touch": True, "is_mobile": True}
TURNED = TABLET | {"viewport": {"width": 1180, "height": 820}}
SECONDS = 30_000.0  # of a machine that is busy
FIRST_CLIP = 3_000.0  # ms from opening to a playing clip: the aim is 1 s, where nothing else runs


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    with serving_fake(tmp_path_factory.mktemp("page") / "games", 4, 0.02) as (found, _):
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture
def opened(browser, address):
    """A page on a wide screen, of which nothing may go wrong."""
    with open_page(browser, address, may_fail=ENDED, **WIDE, **STILL) as (page, wrong):
        page.set_default_timeout(SECONDS)
        ready(page)
        yield page
        assert wrong == []


def ready(page: Any) -> None:
    page.locator("body[data-ready]").wait_for()


def of_server(address: str) -> dict:
    """What a server says of itself."""
    with urllib.request.urlopen(f"{address}/api/v1/server") as answer:
        return json.load(answer)


def begin(page: Any, character: str = "Mika", place: str = "beach") -> None:
    page.click(f"[data-name={character}]")
    page.click(f"[data-name={place}]")
    count_turns(page, 1)


def count_turns(page: Any, number: int, *, timeout: float = SECONDS) -> None:
    expect(page.locator("#board .turn:not(.ahead)")).to_have_count(number, timeout=timeout)


def say(page: Any, line: str, number: int, *, timeout: float = SECONDS) -> None:
    """Types a line, plays it, and waits for the turn of this number."""
    page.fill("#line", line)
    page.press("#line", "Enter")
    count_turns(page, number, timeout=timeout)
    expect(page.locator("#play")).to_be_visible()


def caption(page: Any, text: str) -> None:
    expect(page.locator("#caption")).to_contain_text(text, timeout=SECONDS)


def is_playing(page: Any) -> bool:
    """Whether the clip in front goes on, and has a picture."""
    video = page.locator("#stage video.front").first
    video.wait_for()
    for _ in range(100):
        times = []
        for _ in range(2):
            times.append(video.evaluate("v => [v.currentTime, v.paused, v.videoWidth]"))
            page.wait_for_timeout(60)
        if times[0][0] != times[1][0] and not times[1][1] and times[1][2] > 0:
            return True
    return False


def format_of(download: Any) -> str | None:
    with Image.open(download.path()) as picture:
        return picture.format


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
        page.click("[data-name=Ren]")
        page.click("[data-name=forest]")
        caption(page, "Ren · waving · day forest")
        assert is_playing(page)
        expect(page.locator("#day")).to_contain_text("Day 1: 1 of 10")
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
    page.click("#undo")
    count_turns(page, 2)
    expect(page.locator("#line")).not_to_have_value("")  # the line is back
    page.fill("#line", "")
    page.click("#redo")
    count_turns(page, 3)
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
    expect(page.locator("#status")).to_contain_text("expected an instruction, found nothing")


def test_a_game_from_a_picture(opened, tmp_path):
    page = opened
    Image.new("RGB", (48, 32), "red").save(tmp_path / "hero.png")
    page.click("#own-picture")
    page.click("#picture-form .primary")
    expect(page.locator("#picture-error")).to_contain_text("expected a picture")
    page.set_input_files("#picture-file", str(tmp_path / "hero.png"))
    page.fill("#picture-text", "Character: Hana; Motion: waving.")
    page.click("#picture-form .primary")
    caption(page, "The game starts from your picture")
    expect(page.locator("#still")).to_be_visible()
    say(page, "running", 1)
    expect(page.locator("#still")).to_be_hidden()


def test_a_day_has_an_end(opened):
    page = opened
    begin(page)
    page.click("#open-meters")
    page.fill("#set-stamina", "0")
    page.click("#edit .primary")
    expect(page.locator("#ending-title")).to_contain_text("Mika has no stamina left")
    expect(page.locator("#ending-card")).to_be_visible(timeout=SECONDS)
    with page.expect_download() as download:
        page.click("#ending-save")
    assert format_of(download.value) == "PNG"
    page.click("#next-day")
    expect(page.locator("#day")).to_contain_text("Day 2: 0 of 10")
    assert page.get_attribute("[data-meter=stamina]", "data-value") == "50"
    page.click("#open-save")
    with page.expect_download() as download:
        page.click("#film-gif")
    assert format_of(download.value) == "GIF"


WATCH = """() => {
  const ids = ["#guess", "#stage", "#status"];
  const [guess, stage, status] = ids.map((id) => document.querySelector(id));
  const seen = (window.seen = { frames: [], said: [] });
  const note = () => status.textContent && seen.said.push(status.textContent);
  new MutationObserver(note).observe(status, { childList: true });
  const look = () => {
    const fronts = [...stage.querySelectorAll("video.front")];
    seen.frames.push({
      guess: Number(getComputedStyle(guess).opacity),
      clip: fronts.some((one) => one.readyState >= 2 && getComputedStyle(one).opacity === "1"),
      turns: document.querySelectorAll("#board .turn").length,
    });
    requestAnimationFrame(look);
  };
  look();
}"""
LEVEL = """img => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d");
  context.drawImage(img, 0, 0, 1, 1);
  return context.getImageData(0, 0, 1, 1).data[0];
}"""


@pytest.fixture(scope="module")
def staying(tmp_path_factory) -> Iterator[tuple[str, Any]]:
    """A server of its own, which a test holds: its address and its process."""
    with serving_fake(tmp_path_factory.mktemp("staying") / "games", 4, 0.02) as found:
        yield found


def test_a_first_picture_is_seen_before_the_clip(browser, staying):
    """It covers the clip before, and goes when the new one is there; nothing blinks."""
    address, process = staying
    with open_page(browser, address, may_fail=ENDED, **WIDE) as (page, wrong):
        page.set_default_timeout(SECONDS)
        ready(page)
        page.click("#open-settings")
        page.fill("#seed", "60")
        page.click("#settings .close")
        begin(page)
        assert is_playing(page)
        page.fill("#line", "stay")
        page.press("#line", "Enter")
        guess = page.locator("#guess.front")
        guess.wait_for()
        count_turns(page, 1)  # there is no clip yet
        assert abs(guess.evaluate(LEVEL) - 110) <= 2
        caption(page, "stay")
        caption(page, "a first picture")
        page.reload()  # whoever comes later sees it as well
        ready(page)
        guess.wait_for()
        count_turns(page, 1)
        process.send_signal(signal.SIGUSR1)
        count_turns(page, 2)
        page.locator("#guess:not(.front)").wait_for(state="attached")
        caption(page, "turn 2 of 2")

        assert is_playing(page)
        page.evaluate(WATCH)
        page.fill("#line", "stay")
        page.press("#line", "Enter")
        guess.wait_for()
        page.click("#board .turn >> nth=0")  # who looks back is left alone
        expect(guess).to_have_count(0)
        caption(page, "turn 1 of 2")
        page.click("#board .turn >> nth=1")
        guess.wait_for()
        page.wait_for_timeout(800)  # until it is there in full
        process.send_signal(signal.SIGUSR1)
        count_turns(page, 3)
        page.locator("#guess:not(.front)").wait_for(state="attached")
        page.wait_for_timeout(500)
        seen = page.evaluate("window.seen")
        assert any(frame["guess"] == 1 and frame["turns"] == 2 for frame in seen["frames"])
        assert any(0 < frame["guess"] < 1 for frame in seen["frames"])  # softly
        assert all(frame["clip"] for frame in seen["frames"])
        assert seen["frames"][-1]["guess"] == 0
        said = seen["said"]
        assert said
        assert not any(a == b for a, b in itertools.pairwise(said))
        assert not any("picture" in text for text in said)
        assert wrong == []


def test_a_first_picture_goes_when_its_turn_is_stopped(browser, staying):
    options = WIDE | STILL
    with open_page(browser, staying[0], may_fail=ENDED, **options) as (page, wrong):
        page.set_default_timeout(SECONDS)
        ready(page)
        begin(page)
        page.fill("#line", "stay")
        page.press("#line", "Enter")
        guess = page.locator("#guess.front")
        guess.wait_for()
        assert guess.evaluate("g => getComputedStyle(g).transitionDuration") == "0s"
        assert guess.get_attribute("alt") == ""
        page.click("#stop")
        expect(page.locator("#status")).to_contain_text("Stopped")
        expect(guess).to_have_count(0)
        caption(page, "turn 1 of 1")
        expect(page.locator("#stage video.front")).to_have_count(1)
        assert wrong == []


@pytest.mark.parametrize("options", [TABLET, TURNED], ids=["upright", "on its side"])
def test_on_a_tablet(browser, address, options):
    """Nothing scrolls sideways; in a game the stage is large, and the line is there at once."""
    width, height = options["viewport"]["width"], options["viewport"]["height"]
    with open_page(browser, address, may_fail=ENDED, **options) as (page, wrong):
        page.set_default_timeout(SECONDS)
        ready(page)
        fits = "document.documentElement.scrollWidth <= window.innerWidth"
        assert page.evaluate(fits)
        assert page.evaluate("window.innerWidth") == width
        for name in ("Hana", "town"):
            page.tap(f"[data-name={name}]")
        count_turns(page, 1)
        page.fill("#line", "Motion: running.")
        page.tap("#play")
        count_turns(page, 2)
        assert is_playing(page)
        assert page.evaluate(fits)
        assert page.evaluate("window.scrollY") == 0
        stage, line = page.locator("#stage").bounding_box(), page.locator("#say").bounding_box()
        assert stage["width"] == width
        assert 0.4 * height < stage["height"] < stage["y"] + stage["height"] <= line["y"]
        assert line["y"] + line["height"] <= height
        assert wrong == []


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
        page.fill("#line", "typed during the turn")
        page.click("#stop")
        expect(page.locator("#status")).to_contain_text("Stopped")
        assert page.input_value("#line") == "typed during the turn"
        count_turns(page, 1)
        process.send_signal(signal.SIGUSR1)
        say(page, "jump", 2)
        assert wrong == []


def test_on_a_phone_in_the_dark_by_keyboard(browser, address):
    with open_page(browser, address, may_fail=ENDED, **PHONE) as (page, wrong):
        page.set_default_timeout(SECONDS)
        ready(page)
        for name in ("Hana", "town"):
            page.focus(f"[data-name={name}]")
            page.keyboard.press("Enter")
        count_turns(page, 1)
        page.focus("#line")
        page.keyboard.type("Motion: running.")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # on the button that plays
        count_turns(page, 2)
        assert is_playing(page)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert max(map(int, re.findall(r"\d+", ground)[:3])) < 100
        assert wrong == []


def tab_to(page: Any, selector: str) -> None:
    """Presses Tab until a control has the focus."""
    for _ in range(80):
        if page.evaluate("wanted => document.activeElement.matches(wanted)", selector):
            return
        page.keyboard.press("Tab")
    pytest.fail(f"the Tab key does not reach {selector}")


def reached(page: Any) -> set[str]:
    """What the Tab key reaches in one round: ids, or the names of cards."""
    found = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        found.add(page.evaluate("(e => e.id || e.dataset.name || '')(document.activeElement)"))
    return found


def test_by_keyboard_alone(opened):
    """All controls can be reached, Escape closes, and the focus is never lost."""
    page = opened

    def press(selector: str) -> None:
        tab_to(page, selector)
        page.keyboard.press("Enter")

    def focused(selector: str) -> None:
        expect(page.locator(selector).first).to_be_focused(timeout=SECONDS)

    assert reached(page) >= {
        "home", "open-games", "open-settings", "language", "pause", "Mika", "Ren", "Hana",
        "just-type", "own-picture", "load",
    }  # fmt: skip
    press("[data-name=Mika]")
    press("#back")
    focused("#question")
    press("[data-name=Mika]")
    press("[data-name=beach]")
    count_turns(page, 1)
    focused("#line")
    page.keyboard.type("running")
    page.keyboard.press("Enter")
    count_turns(page, 2)
    focused("#line")
    expect(page.locator("#play")).to_be_visible()
    press("#again")
    page.locator("[data-take]").wait_for()
    focused("#play")  # it was on Stop meanwhile
    assert reached(page) >= {
        "pause", "line", "play", "undo", "again", "open-tree", "open-meters", "open-parts",
        "open-save",
    }  # fmt: skip
    press("[data-take]")
    expect(page.locator("[data-take]")).to_contain_text("take 1/2")
    focused("[data-take]")
    press("#board .column:first-child .turn")
    caption(page, "turn 1 of 2")
    focused("#board .column:first-child .turn")
    press("#branch")
    count_turns(page, 1)
    focused("#board [aria-current=true]")
    press("#open-tree")
    focused("#tree button")
    page.keyboard.press("Escape")
    expect(page.locator("#tree")).to_be_hidden()
    focused("#open-tree")
    page.keyboard.press("Enter")
    press("#tree [aria-current=false]")
    count_turns(page, 2)
    focused("#open-tree")
    for name, dialog in (("games", "games"), ("save", "save"), ("meters", "edit")):
        press(f"#open-{name}")
        expect(page.locator(f"#{dialog}")).to_be_visible()
        assert page.evaluate("!!document.activeElement.closest('dialog')")
        page.keyboard.press("Escape")
        expect(page.locator(f"#{dialog}")).to_be_hidden()
        focused(f"#open-{name}")
    press("#undo")
    count_turns(page, 1)
    focused("#undo")


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


def test_what_players_say_is_never_run(opened):
    page = opened
    said = '<img src=x onerror="window.ran=1"> שלום 🎈 &lt;b&gt;'
    begin(page)
    say(page, said, 2)
    caption(page, said)
    assert page.evaluate("window.ran") is None
    assert page.locator("#caption img, #caption b, #board script").count() == 0


def test_in_other_languages(browser, address):
    with open_page(browser, address, may_fail=ENDED, locale="ja-JP", **STILL) as (page, wrong):
        page.set_default_timeout(SECONDS)
        ready(page)
        expect(page.locator("#question")).to_have_text("だれになる?")
        page.select_option("#language", "zh")
        expect(page.locator("#question")).to_have_text("你想成为谁?")
        assert page.get_attribute("html", "lang") == "zh"
        begin(page)
        expect(page.locator("#undo")).to_have_text("撤销")
        assert wrong == []


def test_what_goes_wrong_is_said_in_japanese(browser, address, tmp_path):
    """Of a file with a name of its own, of the line while it is typed, of a turn, of a number."""
    refused = (*ENDED, "422")
    options = WIDE | STILL | {"locale": "ja-JP"}
    with open_page(browser, address, may_fail=refused, **options) as (page, _):
        page.set_default_timeout(SECONDS)
        ready(page)
        (tmp_path / "hero.png").write_bytes(b"no picture")
        page.click("#own-picture")
        page.set_input_files("#picture-file", str(tmp_path / "hero.png"))
        page.fill("#picture-text", "Character: Hana; Motion: waving.")
        page.click("#picture-form .primary")
        expect(page.locator("#picture-error")).to_contain_text("画像でも映像でもありません")
        page.keyboard.press("Escape")
        (tmp_path / "game.zip").write_bytes(b"no zip")
        page.set_input_files("#load-file", str(tmp_path / "game.zip"))
        expect(page.locator("#status")).to_contain_text("zipが壊れています")
        begin(page)
        page.fill("#line", "走る " * 60)
        expect(page.locator("#reading")).to_contain_text("単語を減らしてください")
        page.fill("#line", "bad")
        page.press("#line", "Enter")
        expect(page.locator("#status")).to_contain_text("映像を作れませんでした")
        page.evaluate("document.querySelector('#steps').value = 2000")
        page.press("#line", "Enter")
        expect(page.locator("#status")).to_have_text(
            "「ノイズ除去の回数」は1から1000までの整数にしてください。"
        )
        page.screenshot(path=os.environ.get("LOOK", str(tmp_path / "look.png")))


@pytest.mark.parametrize("options", [WIDE, PHONE], ids=["wide and light", "a phone in the dark"])
def test_axe_finds_nothing_serious(browser, address, options):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-core is not installed (extra dev)"
    )

    def check(page: Any, where: str) -> None:
        found = axe.Axe().run(page).response["violations"]
        grave = [
            (one["id"], [node["html"][:160] for node in one["nodes"]][:3])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert grave == [], where

    options = options | STILL
    with open_page(browser, address, may_fail=ENDED, **options) as (page, wrong):
        page.set_default_timeout(SECONDS)
        ready(page)
        check(page, "the first screen")
        page.click("#own-picture")
        check(page, "the dialog of a picture")
        page.keyboard.press("Escape")
        page.evaluate("document.querySelector('#login').showModal()")
        check(page, "the login")
        page.keyboard.press("Escape")
        begin(page)
        say(page, "running xeats", 2)
        page.click("#again")
        page.locator("[data-take]").wait_for()
        page.click("#open-parts")
        page.fill("#line", "xeats")
        page.locator("#marks mark").wait_for()
        check(page, "a game")
        video = page.locator("#stage video.front").first
        assert video.evaluate("v => v.paused")  # motion is reduced
        assert video.get_attribute("aria-label").startswith("Clip of turn 2")
        for button, dialog in (
            ("#open-games", "#games"),
            ("#open-save", "#save"),
            ("#open-settings", "#settings"),
            ("#open-meters", "#edit"),
            ("#open-tree", "#tree"),
        ):
            page.click(button)
            page.locator(dialog).wait_for()
            check(page, dialog)
            page.keyboard.press("Escape")
        page.select_option("#language", "ja")
        expect(page.locator("#undo")).to_have_text("元に戻す")
        check(page, "a game in Japanese")
        page.click("#open-meters")
        page.fill("#set-stamina", "0")
        page.click("#edit .primary")
        page.locator("#ending").wait_for()
        check(page, "the end of a day")
        page.goto(f"{address}/api")
        page.locator("#paths details").first.wait_for()
        check(page, "the API's page")
        assert wrong == []


def test_the_page_is_ready_while_the_model_compiles(browser, tmp_path):
    """The first screen says so, a prepared shot plays, and the first turn waits for it."""
    with serving_fake(tmp_path / "games", 4, "--warm-up") as (address, process):
        while of_server(address)["status"] != "warming up":  # it stays in it
            time.sleep(0.05)
        with open_page(browser, address, may_fail=ENDED, **WIDE) as (page, wrong):
            page.set_default_timeout(SECONDS)
            ready(page)
            expect(page.locator("#banner")).to_contain_text("being prepared")
            assert is_playing(page)
            begin(page)
            page.click("#suggestions button >> nth=0")
            expect(page.locator("#status")).to_contain_text("being prepared")
            expect(page.locator("#stop")).to_be_visible()
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
            f"Character: {names[5]}; Motion: {words['motions'][5]}; "
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
