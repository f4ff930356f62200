"""The server as a user starts it, called by Gradio's client: the embedded model plays."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from animegamer_jax import media
from animegamer_jax.data.toyscene import CHARACTERS

gradio_client = pytest.importorskip("gradio_client")

# The client leaves its sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
PLAYED = [
    "Character: Mika; Motion: gently waving; Background: day town.",
    "Motion: quickly run.",
    "Now by night.",
]


@contextlib.contextmanager
def serving(games: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server of the embedded model, as a user starts it: its address and its process."""
    command = [sys.executable, "-m", "animegamer_jax.cli", "serve", "--port", "0"]
    command += ["--games", str(games), "--no-warm-up", *options]
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
        process.stdout.close()


@pytest.fixture(scope="module")
def games(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("serve") / "games"


@pytest.fixture(scope="module")
def address(games) -> Iterator[str]:
    with serving(games) as (found, _):
        yield found


@pytest.fixture(scope="module")
def client(address) -> Any:
    return gradio_client.Client(address, verbose=False)


def new_game(client: Any, seed: int = 0) -> str:
    return client.predict(seed, 0, 0, api_name="/new_game")["game"]


def play_turn(client: Any, game: str, text: str, level: int = 0) -> dict:
    return client.predict(game, text, level, api_name="/play_turn")


def test_eight_games_at_once_are_what_each_is_alone(client, address, games):
    """Each gets its own answer, in batches: states equal, frames but for sums in another order."""

    def play(game: str, name: str) -> None:
        own = gradio_client.Client(address, verbose=False)
        play_turn(own, game, f"Character: {name}; Motion: gently waving; Background: day town.")
        play_turn(own, game, PLAYED[1])

    alone = [new_game(client, seed) for seed in range(8)]
    for game, name in zip(alone, CHARACTERS, strict=True):
        play(game, name)
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
                    for g, t in zip(ids, told, strict=True)
                ]
            )
            for ids, told in ((alone, expected), (together, found))
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
        assert caught.value.code in (403, 404)


def test_a_player_who_leaves_finds_the_turn(client, address):
    """Its connection ends in the middle: the turn does not."""
    game = new_game(client)
    other = gradio_client.Client(address, verbose=False)
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


def test_a_server_killed_in_a_turn_has_the_whole_ones(tmp_path):
    games = tmp_path / "games"
    with serving(games, "--steps", "300") as (address, process):
        client = gradio_client.Client(address, verbose=False)
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
        client = gradio_client.Client(address, verbose=False)
        assert len(client.predict(game, api_name="/show")["turns"]) == 1
        assert client.predict(slow, api_name="/show")["turns"] == []
        assert play_turn(client, game, PLAYED[1])["turn"] == 2


def test_only_for_those_who_may(tmp_path):
    with serving(tmp_path / "games", "--auth", "kiki:broom", "--max-games", "1") as (address, _):
        with pytest.raises(Exception, match="credentials were not provided"):
            gradio_client.Client(address, verbose=False)
        client = gradio_client.Client(address, auth=("kiki", "broom"), verbose=False)
        new_game(client)
        with pytest.raises(Exception, match="as many as this server takes"):
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
    told = capsys.readouterr().err.strip()
    assert re.search(message, told)
    assert "\n" not in told
