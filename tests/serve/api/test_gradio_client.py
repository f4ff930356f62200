"""The API by Gradio's client, with the embedded model behind it."""

import gc
import json
import re
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from served import serving
from waiting import wait_until

from animegamer_jax.media import video as media
from animegamer_jax.toy.scene import CHARACTERS

gradio_client = pytest.importorskip("gradio_client")

# The client leaves its sockets to the garbage collector; `clients` collects them at the end.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
PLAYED = [
    "Character: Mika; Motion: gently waving; Background: day town.",
    "Motion: quickly run.",
    "Now by night.",
]


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
    with serving(games, "--steps", "2") as (found, _):
        yield found


@pytest.fixture(scope="module")
def client(address, new_client) -> Any:
    return new_client(address)


def new_game(client: Any, seed: int = 0) -> str:
    return client.predict(seed, 0, 0, api_name="/new_game")["game"]


def play_turn(client: Any, game: str, text: str, level: int = 0) -> dict:
    return client.predict(game, text, level, api_name="/play_turn")


def write_picture(path: Path) -> str:
    frame = media.read_mp4(next(path.parent.rglob("turn_001.mp4")))[0]
    Image.fromarray(frame).save(path)
    return str(path)


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
        # A second turn begins with its own drawing of the first, and guidance enlarges what sums
        # in another order leave.
        assert apart.diagonal().max() < (1, 2)[turn]
        assert apart[~np.eye(8, dtype=bool)].min() > 5 * apart.diagonal().max()


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
    log = games.with_suffix(".log")  # its line follows the answer
    wait_until(lambda: "127.0.0.1 GET /health 200" in log.read_text())
    assert "6.6.6.6" not in log.read_text()


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
