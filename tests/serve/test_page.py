"""The page in a real browser, and the API by Gradio's client: the embedded model behind both.

Pictures of the page go to the folder that SCREENSHOTS names (`make screenshots`).
"""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_player
import numpy as np
import pytest
from browser import open_browser, open_page
from PIL import Image

from animegamer_jax.media import video as media
from animegamer_jax.toy.scene import CHARACTERS

gradio_client = pytest.importorskip("gradio_client")
playwright = pytest.importorskip("playwright.sync_api")

# The client leaves its sockets to the garbage collector; `clients` collects them at the end.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
# Gradio's page ends its own streams, which the browser calls failed.
STREAMS = ("/queue/data?", "/heartbeat/")
PLAYED = [
    "Character: Mika; Motion: gently waving; Background: day town.",
    "Motion: quickly run.",
    "Now by night.",
]


def serving(games: Path, *options: str) -> Any:
    """A server of the embedded model, as a user starts it: its address and its process."""
    command = [sys.executable, "-m", "animegamer_jax.cli", "serve", "--port", "0"]
    return started([*command, "--games", str(games), "--no-warm-up", *options], games)


@contextlib.contextmanager
def started(command: list[str], games: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server, its address and its process."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    log = games.with_suffix(".log")
    with log.open("a") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://\S+", line):
                yield found[0], process
                break
        else:
            pytest.fail(log.read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="module", autouse=True)
def clients() -> Iterator[list[Any]]:
    """The clients of these tests, ended after the last server, with the sockets they left."""
    opened: list[Any] = []
    yield opened
    for client in opened:
        client.close()
    opened.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def new_client(clients) -> Callable[..., Any]:
    """Opens a client of a server's address."""

    def open_client(address: str, **options: Any) -> Any:
        clients.append(gradio_client.Client(address, verbose=False, **options))
        return clients[-1]

    return open_client


@pytest.fixture(scope="module")
def games(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("serve") / "games"


@pytest.fixture(scope="module")
def address(games) -> Iterator[str]:
    with serving(games) as (found, _):
        yield found


@pytest.fixture(scope="module")
def client(address, new_client) -> Any:
    return new_client(address)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


def new_game(client: Any, seed: int = 0) -> str:
    return client.predict(seed, 0, 0, api_name="/new_game")["game"]


def play_turn(client: Any, game: str, text: str, level: int = 0) -> dict:
    return client.predict(game, text, level, api_name="/play_turn")


def shoot(page: Any, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / name), full_page=True)


def wait_for_text(page: Any, place: str, text: str) -> None:
    element = f"document.querySelector('{place}')"
    found = f"{element}?.innerText.includes({json.dumps(text)})"
    try:
        page.wait_for_function(found, timeout=40_000)
    except playwright.TimeoutError:
        shown = {name: page.inner_text(name) for name in ("#about", "#status")}
        pytest.fail(f"expected {text!r} in {place}, found {shown}")


def wait_for_turn(page: Any, number: int, total: int | None = None) -> None:
    wait_for_text(page, "#about", f"turn {number} of {total or number}")


def wait_for_status(page: Any, text: str) -> None:
    wait_for_text(page, "#status", text)


def say(page: Any, text: str) -> None:
    """Types a line and presses Enter until its turn is begun: then the page has emptied the line.

    Gradio ignores what is pressed until the browser knows that the turn before has ended, a moment
    after it was shown.
    """
    page.fill("#line textarea", text)
    for _ in range(40):
        page.press("#line textarea", "Enter")
        with contextlib.suppress(playwright.TimeoutError):
            emptied = "document.querySelector('#line textarea').value === ''"
            page.wait_for_function(emptied, timeout=1000)
            return
    pytest.fail(f"the turn is not begun: {page.inner_text('#status')!r}")


def set_steps(page: Any, steps: str) -> str:
    """Sets the denoising steps in the settings, which are closed; returns what they were."""
    number = "#steps input[type=number]"
    page.get_by_text("Settings").click()
    page.wait_for_selector(number)
    before = page.input_value(number)
    for _ in range(20):  # until it stays: the page sets its own when it has just drawn it
        page.fill(number, steps)
        page.press(number, "Tab")
        page.wait_for_timeout(200)
        if page.input_value(number) == steps:
            return before
    pytest.fail(f"the steps stay {page.input_value(number)}")


def playing(page: Any) -> bool:
    """Whether the clip runs: its time goes on, it repeats, it has a picture."""
    page.wait_for_function(
        "(v => v && v.readyState >= 2 && v.currentTime > 0)(document.querySelector('#clip video'))",
        timeout=20_000,
    )
    video = "document.querySelector('#clip video')"
    before = page.evaluate(f"{video}.currentTime")
    page.wait_for_function(f"{video}.currentTime != {before}", timeout=5_000)
    return page.evaluate(f"{video}.loop && !{video}.paused && {video}.videoWidth > 0")


def test_a_game_in_the_browser(browser, address, tmp_path):
    """Three turns, one of them without its place; undo, branch, reload, download, load."""
    options = {"viewport": {"width": 1200, "height": 900}, "accept_downloads": True}
    with open_page(browser, address, may_fail=STREAMS, **options) as (page, wrong):
        page.wait_for_selector("#line textarea")
        wait_for_text(page, "#about", "No turn yet")
        page.fill("#line textarea", PLAYED[0])
        page.click("#play-line")
        wait_for_turn(page, 1)
        assert playing(page)
        assert page.input_value("#line textarea") == ""
        meters = {
            name: page.get_attribute(f"[data-meter={name}]", "data-value")
            for name in ("stamina", "social", "entertainment")
        }
        assert any(value != "50" for value in meters.values())

        page.get_by_role("tab", name="In parts").click()
        page.fill("#field-adverb input", "quickly")
        page.fill("#field-motion input", "running")
        page.press("#field-motion input", "Enter")
        page.click("#play-parts")
        wait_for_turn(page, 2)
        assert "Motion: quickly running." in page.inner_text("#about")

        page.get_by_role("tab", name="In words").click()
        say(page, PLAYED[2])
        wait_for_turn(page, 3)
        assert playing(page)
        page.wait_for_function("document.querySelectorAll('#board img').length == 3")
        shoot(page, "serve.png")

        page.click("#board img >> nth=0")
        wait_for_turn(page, 1, 3)
        page.click("#branch")
        wait_for_turn(page, 1)
        wait_for_status(page, "A new game that continues after turn 1")

        say(page, "Motion: jump.")
        wait_for_turn(page, 2)
        page.click("#again")
        page.wait_for_function(
            "/turn 2 of 2 .* seed [1-9]/.test(document.querySelector('#about').innerText)",
            timeout=60_000,
        )  # the game's own seed is 0
        page.click("#undo")
        wait_for_turn(page, 1)
        wait_for_status(page, "The last turn is undone")

        page.reload()
        wait_for_turn(page, 1)
        assert playing(page)

        with page.expect_download() as download:
            page.click("#save")
        path = tmp_path / "game.zip"
        download.value.save_as(path)
        with zipfile.ZipFile(path) as archive:
            names = {"game.json", "game.mp4", "storyboard.png", "turn_001.mp4"}
            assert names <= set(archive.namelist())

        page.click("#new")
        wait_for_status(page, "A new game")
        wait_for_text(page, "#about", "No turn yet")
        with page.expect_file_chooser() as chooser:
            page.click("#load")
        chooser.value.set_files(str(path))
        wait_for_status(page, "The game is loaded")
        wait_for_turn(page, 1)
        assert wrong == []


def write_picture(path: Path) -> str:
    frame = media.read_mp4(next(path.parent.rglob("turn_001.mp4")))[0]
    Image.fromarray(frame).save(path)
    return str(path)


def test_a_game_from_a_picture_in_the_browser(browser, address, client, games):
    name = new_game(client)
    play_turn(client, name, PLAYED[0])
    picture = write_picture(games / name / "hero.png")
    with open_page(browser, address, may_fail=STREAMS) as (page, wrong):
        page.wait_for_selector("#line textarea")
        page.get_by_text("Start from your own picture").click()
        page.wait_for_selector("#picture-text textarea")
        page.click("#new-picture")
        wait_for_status(page, "expected a picture, found no file")
        page.set_input_files("#picture input[type=file]", picture)
        page.wait_for_function(
            "document.querySelector('#picture').innerText.includes('hero')", timeout=20_000
        )
        page.fill("#picture-text textarea", PLAYED[0])
        page.click("#new-picture")
        wait_for_status(page, "A new game from your picture")
        wait_for_text(page, "#about", "The game starts from your picture")
        page.wait_for_function("document.querySelectorAll('#board img').length == 1")
        say(page, "Motion: jump.")
        wait_for_turn(page, 1)
        page.wait_for_function("document.querySelectorAll('#board img').length == 2")
        assert wrong == []


def test_a_game_from_a_picture_by_the_api(client, games, tmp_path):
    name = new_game(client)
    play_turn(client, name, PLAYED[0])
    frame = gradio_client.handle_file(write_picture(games / name / "hero.png"))
    start = {"text": PLAYED[0], "api_name": "/new_game_from_picture"}
    states = [
        client.predict(picture=picture, **start)
        for picture in (frame, gradio_client.handle_file(str(games / name / "turn_001.mp4")))
    ]
    for state in states:
        assert state["picture"]["instruction"] == PLAYED[0]
        assert state["turns"] == []
    turn = play_turn(client, states[0]["game"], "Motion: jump.")
    archive = client.predict(states[0]["game"], api_name="/download")
    loaded = client.predict(gradio_client.handle_file(archive), api_name="/load")
    assert loaded["picture"] == states[0]["picture"]
    assert loaded["turns"] == [turn]
    (tmp_path / "text.png").write_text("hero")
    bad = gradio_client.handle_file(str(tmp_path / "text.png"))
    with pytest.raises(Exception, match=r"text\.png: expected a picture .*, found neither"):
        client.predict(picture=bad, **start)


def test_a_turn_is_stopped(browser, tmp_path):
    """By a player that stays in its first step, so that there is always something to stop."""
    games = tmp_path / "games"
    command = [sys.executable, fake_player.__file__, str(games), "200"]
    with (
        started(command, games) as (address, process),
        open_page(browser, address, may_fail=STREAMS) as (page, wrong),
    ):
        page.wait_for_selector("#line textarea")
        assert set_steps(page, "50") == "200"
        say(page, "Motion: jump.")
        wait_for_status(page, "of 50")
        page.click("#undo")
        wait_for_text(page, "body", "a turn is being played")
        page.click("#stop")
        wait_for_status(page, "Stopped: the game is unchanged")
        wait_for_text(page, "#about", "No turn yet")
        process.send_signal(signal.SIGUSR1)
        say(page, "Motion: jump.")
        wait_for_turn(page, 1)
        assert wrong == []


def test_on_a_phone_in_the_dark_by_keyboard(browser, address):
    options = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}
    with open_page(browser, address, may_fail=STREAMS, **options) as (page, wrong):
        page.wait_for_selector("#line textarea")
        page.focus("#line textarea")
        page.keyboard.type(PLAYED[0])
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # on the button that plays
        wait_for_turn(page, 1)
        assert playing(page)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, re.findall(r"\d+", ground)[:3])) < 100
        shoot(page, "serve-phone.png")
        assert wrong == []


def test_what_players_say_is_never_run(browser, address):
    said = '<img src=x onerror="window.ran=1"> שלום 🎈 &lt;b&gt;'
    with open_page(browser, address, may_fail=STREAMS) as (page, wrong):
        page.wait_for_selector("#line textarea")
        page.fill("#line textarea", said)
        page.click("#play-line")
        wait_for_turn(page, 1)
        assert said in page.inner_text("#about")
        assert page.evaluate("window.ran") is None
        assert page.locator("#about img, #about script, #board script").count() == 0
        for text, reported in (
            ("", "expected an instruction, found nothing"),
            ("x" * 10_000, "at most 500 characters"),
        ):
            page.wait_for_timeout(500)  # the turn before has ended for the browser too
            page.fill("#line textarea", text)
            page.click("#play-line")
            wait_for_status(page, reported)
            assert page.input_value("#line textarea") == text  # to be corrected, not typed again
        assert wrong == []


def test_what_is_typed_during_a_turn_stays(browser, address):
    with open_page(browser, address, may_fail=STREAMS) as (page, wrong):
        page.wait_for_selector("#line textarea")
        page.fill("#line textarea", "Character: Mika; Motion: wave; Background: day town.")
        page.click("#play-line")
        page.wait_for_function("document.querySelector('#line textarea').value === ''")
        page.fill("#line textarea", "Go on, faster.")
        wait_for_turn(page, 1)
        page.wait_for_timeout(500)
        assert page.input_value("#line textarea") == "Go on, faster."
        page.press("#line textarea", "Enter")
        wait_for_turn(page, 2)
        assert page.input_value("#line textarea") == ""
        assert wrong == []


@pytest.mark.slow
def test_eight_games_at_once_are_what_each_is_alone(client, address, games, new_client):
    """Each gets its own answer, in batches: states equal, frames but for sums in another order."""

    def play(game: str, name: str, own: Any = None) -> None:
        own = own or new_client(address)
        play_turn(own, game, f"Character: {name}; Motion: gently waving; Background: day town.")
        play_turn(own, game, PLAYED[1])

    alone = [new_game(client, seed) for seed in range(8)]
    for game, name in zip(alone, CHARACTERS, strict=True):
        play(game, name, client)
    together = [new_game(client, seed) for seed in range(8)]
    threads = [
        threading.Thread(target=play, args=pair) for pair in zip(together, CHARACTERS, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected, found = (
        [client.predict(game, api_name="/show")["turns"] for game in some]
        for some in (alone, together)
    )
    for a, b in zip(expected, found, strict=True):
        assert len(b) == 2
        for name in ("motion_level", "meters", "seed", "instruction"):
            assert [turn[name] for turn in a] == [turn[name] for turn in b]
    for turn in range(2):
        clips, others = (
            np.stack(
                [
                    media.read_mp4(games / g / t[turn]["clip"])
                    for g, t in zip(ids, reported, strict=True)
                ]
            )
            for ids, reported in ((alone, expected), (together, found))
        )
        apart = np.abs(clips[:, None].astype(np.float32) - others[None]).mean(axis=(2, 3, 4, 5))
        assert apart.diagonal().max() < 1
        assert apart[~np.eye(8, dtype=bool)].min() > 2 * apart.diagonal().max()


def test_the_api(client, games):
    game = new_game(client, 5)
    turn = play_turn(client, game, PLAYED[0], level=5)
    assert (turn["motion_level"], turn["chosen_level"], turn["seed"]) == (5, True, 5)
    again = client.predict(game, 77, 0, api_name="/try_again")
    assert (again["turn"], again["seed"], again["chosen_level"]) == (1, 77, False)
    play_turn(client, game, PLAYED[1])
    clip = client.predict(game, 2, api_name="/clip")
    assert len(media.read_mp4(Path(clip))) == 17
    archive = client.predict(game, api_name="/download")
    loaded = client.predict(gradio_client.handle_file(archive), api_name="/load")
    assert [t["instruction"] for t in loaded["turns"]] == PLAYED[:2]
    assert loaded["game"] != game
    branch = client.predict(game, 1, api_name="/branch")
    assert len(branch["turns"]) == 1
    assert client.predict(game, api_name="/progress") == {"status": "idle"}
    assert client.predict(game, api_name="/stop") is False
    assert len(client.predict(game, api_name="/undo")["turns"]) == 1


def test_what_the_api_refuses(client, tmp_path):
    game = new_game(client)
    wrong = tmp_path / "wrong.zip"
    wrong.write_bytes(b"no zip")
    for call, message in (
        (lambda: play_turn(client, "0" * 24, "wave"), "no game"),
        (lambda: play_turn(client, "../../etc", "wave"), "no game"),
        (lambda: play_turn(client, game, ""), "found nothing"),
        (lambda: play_turn(client, game, "a\x00b"), "control character"),
        (lambda: play_turn(client, game, "wave", level=9), "motion level 9"),
        (lambda: client.predict(-1, 0, 0, api_name="/new_game"), "seed: expected"),
        (lambda: client.predict(game, 3, api_name="/clip"), "turn 3: expected 1 to 0"),
        (lambda: client.predict(game, api_name="/download"), "no turns yet"),
        (lambda: client.predict(game, api_name="/undo"), "no turn to undo"),
        (lambda: client.predict(game, 4, api_name="/branch"), "branch: expected"),
        (
            lambda: client.predict(gradio_client.handle_file(str(wrong)), api_name="/load"),
            "damaged zip",
        ),
    ):
        with pytest.raises(Exception, match=message):
            call()


def test_no_file_but_what_the_page_shows(client, address, games):
    game = new_game(client)
    play_turn(client, game, PLAYED[0])
    for path in ("/etc/passwd", f"{games / game / 'game.json'}", str(Path(__file__))):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{address}/gradio_api/file={path}")
        with caught.value as refusal:  # an open answer keeps its socket
            assert refusal.code in (403, 404)


def test_a_forwarded_address_is_ignored(address, games):
    """No proxy is trusted, so nobody can choose the client that they are."""
    request = urllib.request.Request(f"{address}/health", headers={"X-Forwarded-For": "6.6.6.6"})
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer) == {"status": "ready"}
    log = games.with_suffix(".log").read_text()
    assert "127.0.0.1 GET /health 200" in log
    assert "6.6.6.6" not in log


def test_a_player_who_leaves_finds_the_turn(client, address, new_client):
    """Its connection ends in the middle: the turn does not."""
    game = new_game(client)
    other = new_client(address)
    other.submit(game, PLAYED[0], 0, api_name="/play_turn")
    until = time.monotonic() + 60
    while client.predict(game, api_name="/progress")["status"] == "idle":
        if client.predict(game, api_name="/show")["turns"]:
            break
        assert time.monotonic() < until
    other.close()
    while not client.predict(game, api_name="/show")["turns"]:
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_a_server_killed_in_a_turn_has_the_whole_ones(tmp_path, new_client):
    games = tmp_path / "games"
    with serving(games, "--steps", "300", "--max-steps", "1000") as (address, process):
        client = new_client(address)
        game = client.predict(0, 0, 2, api_name="/new_game")["game"]
        play_turn(client, game, PLAYED[0])
        slow = client.predict(0, 0, 1000, api_name="/new_game")["game"]
        client.submit(slow, PLAYED[0], 0, api_name="/play_turn")
        until = time.monotonic() + 60
        while client.predict(slow, api_name="/progress")["status"] != "playing":
            assert time.monotonic() < until
        process.kill()
        process.wait()
    with serving(games) as (address, _):
        client = new_client(address)
        assert len(client.predict(game, api_name="/show")["turns"]) == 1
        assert client.predict(slow, api_name="/show")["turns"] == []
        assert play_turn(client, game, PLAYED[1])["turn"] == 2


def test_only_for_those_who_may(tmp_path, new_client):
    with serving(tmp_path / "games", "--auth", "kiki:broom", "--max-games", "1") as (address, _):
        with pytest.raises(Exception, match="credentials were not provided"):
            new_client(address)
        client = new_client(address, auth=("kiki", "broom"))
        new_game(client)
        with pytest.raises(Exception, match="the most that this server allows"):
            new_game(client)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--auth", "kiki"], "--auth: expected name:password"),
        (["--port", "99999"], "--port: expected a whole number, 0 to 65535"),
        (["--max-games", "0"], "--max-games: expected"),
        (["--host", "192.0.2.1"], "cannot serve there"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_bad_options_are_one_line(options, message, capsys):
    from animegamer_jax.cli import main

    assert main(["serve", *options]) == 2
    reported = capsys.readouterr().err.strip()
    assert re.search(message, reported)
    assert "\n" not in reported
