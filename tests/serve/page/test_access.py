"""The page on other screens, by keyboard, in other languages, and by axe's rules."""

import os
import re
from typing import Any

import pytest
from browser import open_page
from page_games import (
    ENDED,
    PHONE,
    SECONDS,
    STILL,
    TABLET,
    TURNED,
    WIDE,
    begin,
    caption,
    count_turns,
    expect,
    is_playing,
    ready,
    say,
)


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


def test_on_low_windows(opened):
    """All but the end of the story is seen without scrolling, and why a line is held back."""
    page = opened
    begin(page)
    say(page, "running", 2)
    page.fill("#line", "xaruto")
    page.press("#line", "Enter")
    page.locator("#anyway").wait_for()
    for width, height in ((1280, 800), (1366, 650), (1024, 600), (844, 390)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("window.scrollY") == 0
        assert page.evaluate("document.documentElement.scrollWidth") == width
        for part in ("#meters", "#day", "#stage", "#say", "#anyway", "#undo"):
            box = page.locator(part).bounding_box()
            assert box["y"] >= 0, part
            assert box["y"] + box["height"] <= height, (part, height)
        assert height < 500 or page.locator("#board").bounding_box()["y"] < height - 40
        clip, text = page.locator("#stage video.front"), page.locator("#caption")
        assert clip.evaluate("v => v.clientHeight") > 0.35 * height
        shown = clip.evaluate("""v => {
          const box = v.getBoundingClientRect();
          const wide = Math.min(box.width, (box.height * v.videoWidth) / v.videoHeight);
          return { left: (box.left + box.right - wide) / 2, bottom: box.bottom };
        }""")  # the caption covers none of it
        below = text.bounding_box()["y"] >= shown["bottom"] - 1
        right = text.bounding_box()["x"] + text.bounding_box()["width"]
        assert below or right <= shown["left"]


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
    press(".skip")
    focused("#question")
    press("[data-name=Mika]")
    press("#back")
    focused("#question")
    press("[data-name=Mika]")
    page.go_back()  # stays on the page
    expect(page.locator("#question")).to_have_text("Who will you be?")
    page.go_forward()
    press("[data-name=beach]")
    count_turns(page, 1)
    focused("#line")
    page.evaluate("document.activeElement.blur()")
    press(".skip")
    focused("#line")
    count_turns(page, 1)
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
        assert page.get_attribute("#card", "href").endswith("&language=zh")
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
