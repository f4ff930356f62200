"""Games played on the page in a real browser; skips the module that imports it without one."""

import json
import urllib.request
from typing import Any

import pytest

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
    """Whether the clip in front plays, and has a picture."""
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
