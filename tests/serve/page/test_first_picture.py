"""The first picture of a clip, which is seen before the clip."""

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from browser import open_page
from page_games import (
    ENDED,
    SECONDS,
    STILL,
    WIDE,
    begin,
    caption,
    count_turns,
    expect,
    is_playing,
    ready,
)
from served import serving_fake

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

SLOW_PLAY = """() => {
  const play = HTMLMediaElement.prototype.play;
  const wait = () => new Promise((done) => setTimeout(done, 400));
  HTMLMediaElement.prototype.play = function () {
    return wait().then(() => play.call(this));
  };
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


def stay(page: Any) -> Any:
    """Plays a turn that stays with its first picture, and returns this once it is seen."""
    page.fill("#line", "stay")
    page.press("#line", "Enter")
    guess = page.locator("#guess.front")
    guess.wait_for()
    return guess


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
        guess = stay(page)
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
        stay(page)
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


def test_a_clip_is_there_whenever_another_is_asked_for(browser, staying):
    """Also while a loop begins its next round: on a busy machine that takes a while."""
    address, process = staying
    with open_page(browser, address, may_fail=ENDED, **WIDE) as (page, wrong):
        page.set_default_timeout(SECONDS)
        ready(page)
        begin(page)
        stay(page)
        process.send_signal(signal.SIGUSR1)
        count_turns(page, 2)
        page.locator("#guess:not(.front)").wait_for(state="attached")
        caption(page, "turn 2 of 2")
        assert is_playing(page)
        page.evaluate(SLOW_PLAY)
        page.evaluate(WATCH)
        for number in range(6):
            page.click(f"#board .turn >> nth={number % 2}")
            caption(page, f"turn {number % 2 + 1} of 2")
            page.wait_for_timeout(1500 + 200 * number)  # at another moment of the clip each time
        assert all(frame["clip"] for frame in page.evaluate("window.seen.frames"))
        assert wrong == []


def test_a_first_picture_goes_when_its_turn_is_stopped(browser, staying):
    options = WIDE | STILL
    with open_page(browser, staying[0], may_fail=ENDED, **options) as (page, wrong):
        page.set_default_timeout(SECONDS)
        ready(page)
        begin(page)
        guess = stay(page)
        assert guess.evaluate("g => getComputedStyle(g).transitionDuration") == "0s"
        assert guess.get_attribute("alt") == ""
        page.click("#stop")
        expect(page.locator("#status")).to_contain_text("Stopped")
        expect(guess).to_have_count(0)
        caption(page, "turn 1 of 1")
        expect(page.locator("#stage video.front")).to_have_count(1)
        assert wrong == []
