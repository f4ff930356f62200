"""A turn's events over HTTP, for its player and who follows its game, in this process. No JAX."""

import base64
import io
import json
import threading
import time
from typing import Any

import numpy as np
from api_calls import new_game, ok, play, refusal
from PIL import Image
from waiting import wait_until

from animegamer_jax.game.saved_game import Game
from animegamer_jax.serve.api import answers, models
from animegamer_jax.serve.engine.turn_request import TurnRequest
from animegamer_jax.serve.games.hub import Follower


def events(text: str) -> list[tuple[str, Any]]:
    parts = [part for part in text.split("\n\n") if part.startswith("event:")]
    pairs = (part.removeprefix("event: ").split("\ndata: ", 1) for part in parts)
    return [(kind, json.loads(data) if data else None) for kind, data in pairs]


def test_a_turn_as_events(client):
    game = new_game(client)["game"]
    answer = client.post(f"games/{game}/turns?reply=events", json={"instruction": "wave"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    assert {kind for kind, _ in found} - {"picture"} == {"progress", "turn"}
    assert found[-1][1]["turn"] == 1
    assert found[-2][1]["status"] == "done"


def colour(picture: dict) -> int:
    """The level of a first picture of one grey."""
    media, _, data = picture["picture"].partition(",")
    assert media == "data:image/jpeg;base64"
    return int(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).mean().round())


def test_a_first_picture_comes_before_the_clip(client, actions, player, monkeypatch):
    """To who plays the turn, to who follows the game, and to who comes later; each game its own."""
    player.hold.clear()
    busy = new_game(client)["game"]
    ok(client.post(f"games/{busy}/turns?reply=accepted", json={"instruction": "busy"}), 202)
    games = [new_game(client, seed=seed)["game"] for seed in (20, 120)]
    texts: dict[str, str] = {}
    sent: list[TurnRequest] = []

    def first_picture(request: TurnRequest) -> models.FirstPictureModel | None:
        sent.append(request)
        return build_picture(request)

    build_picture = answers.first_picture
    monkeypatch.setattr(answers, "first_picture", first_picture)

    def play_as_events(game: str) -> None:
        wanted = {"instruction": "stay", "steps": 6}
        texts[game] = client.post(f"games/{game}/turns?reply=events", json=wanted).text

    def follow(name: str) -> None:
        texts[name] = client.get(f"games/{games[0]}/events").text

    threads = [threading.Thread(target=play_as_events, args=(game,)) for game in games]
    threads.append(threading.Thread(target=follow, args=("early",)))
    for thread in threads:
        thread.start()
    wait_until(lambda: all(map(actions.engine.request_of, games)))
    requests = [actions.engine.request_of(game) for game in games]
    player.hold.set()  # both are played as one batch, up to the step after their first pictures
    wait_until(lambda: all(request.first_picture for request in requests))
    assert [ok(client.get(f"games/{game}"))["turns"] for game in games] == [[], []]
    threads.append(threading.Thread(target=follow, args=("late",)))
    threads[-1].start()
    wait_until(lambda: len(sent) >= len(threads))
    player.hold.set()
    threads[0].join(20)
    threads[1].join(20)
    actions.hub.close()
    for thread in threads[2:]:
        thread.join(20)
    for name, text in texts.items():
        found = events(text)
        (picture,) = (data for kind, data in found if kind == "picture")
        expected = {"turn": 1, "instruction": "stay", "step": 3, "steps": 6}
        assert expected == {key: picture[key] for key in expected}
        assert abs(colour(picture) - (170 if name == games[1] else 70)) <= 1
        assert models.FirstPictureModel.model_validate(picture)
        kinds = ["done" if (data or {}).get("status") == "done" else kind for kind, data in found]
        assert kinds.index("picture") < kinds.index("done")


def test_everybody_who_follows_a_game_sees_its_turns(client, actions, player, monkeypatch):
    game = new_game(client)["game"]
    texts: list[str] = []
    asked = threading.local()
    seen: set[tuple[str, int]] = set()  # client, number of turns
    waiting: set[Follower] = set()  # those to whom everything so far was sent

    def find(name: str, *, client: str) -> Game:
        asked.client = client
        return find_game(name, client=client)

    def game_state(*args: Any, **options: Any) -> models.GameModel:
        state = build_state(*args, **options)
        seen.add((asked.client, len(state.turns)))
        return state

    async def wait(follower: Follower, seconds: float) -> bool:
        waiting.add(follower)
        return await wait_for_change(follower, seconds)

    def follow(who: str) -> None:  # until the hub is closed
        texts.append(client.get(f"games/{game}/events", headers={"x-client": who}).text)

    find_game, build_state, wait_for_change = actions.find, answers.game_state, Follower.wait
    monkeypatch.setattr(actions, "find", find)
    monkeypatch.setattr(answers, "game_state", game_state)
    monkeypatch.setattr(Follower, "wait", wait)
    threads = [threading.Thread(target=follow, args=(who,)) for who in ("a", "b")]
    for thread in threads:
        thread.start()
    wait_until(lambda: seen >= {("a", 0), ("b", 0)})
    wait_until(lambda: len(waiting) == 2)
    answer = client.post(f"games/{game}/turns?reply=accepted", json={"instruction": "wave"})
    assert ok(answer, 202)["status"] in ("waiting", "playing")
    wait_until(lambda: seen >= {("a", 1), ("b", 1)})
    wait_until(lambda: actions.engine.request_of(game) is None)
    ok(client.post(f"games/{game}/undo", json={}))
    actions.hub.close()
    for thread in threads:
        thread.join(20)
    for text in texts:
        found = events(text)
        counts = [len(data["turns"]) for kind, data in found if kind == "state"]
        assert counts[0] == counts[-1] == 0
        assert 1 in counts
        assert [kind for kind, _ in found][-1] == "closing"
        statuses = [data["status"] for kind, data in found if kind == "progress"]
        assert statuses[0] == statuses[-1] == "idle"
        assert "done" in statuses


def test_why_a_turn_failed_reaches_those_who_follow(client, actions):
    game = new_game(client)["game"]
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(client.get(f"games/{game}/events").text))
    thread.start()
    wait_until(lambda: game in actions.hub._followers)
    found = refusal(client.post(f"games/{game}/turns", json={"instruction": "bad"}))
    assert "try another seed" in found["error"]
    actions.hub.close()
    thread.join(20)
    failed = [data for kind, data in events(texts[0]) if data and data.get("status") == "failed"]
    assert "try another seed" in failed[0]["error"]


def test_a_turn_is_stopped(client, player):
    game = new_game(client)["game"]
    player.hold.clear()
    ok(client.post(f"games/{game}/turns?reply=accepted", json={"instruction": "wave"}), 202)
    for path in ("undo", "redo", "again"):
        found = refusal(client.post(f"games/{game}/{path}", json={}))
        assert "played" in found["error"] or "no turn" in found["error"]
    assert ok(client.post(f"games/{game}/stop")) is True
    player.hold.set()
    until = time.monotonic() + 20
    while ok(client.get(f"games/{game}/progress"))["status"] != "idle":
        assert time.monotonic() < until
    assert ok(client.post(f"games/{game}/stop")) is False
    assert play(client, game)["turn"] == 1
