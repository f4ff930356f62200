"""The API over HTTP, in this process: typed answers, a game as a tree, files. No JAX."""

import dataclasses
import io
import itertools
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_calls import new_game, ok, play, refusal
from fake_player import FRAMES, WORDS
from PIL import Image

from animegamer_jax.media import video
from animegamer_jax.serve.api import models
from animegamer_jax.serve.api.routes import LoginError
from animegamer_jax.serve.page import page


def turns(state: dict) -> list[str]:
    return [turn["id"] for turn in state["turns"]]


def test_what_is_played_here(client, actions):
    found = ok(client.get("server"))
    assert (found["model"], found["status"], found["width"], found["height"]) == (
        "tiny", "ready", 360, 240,
    )  # fmt: skip
    assert found["words"]["characters"] == list(WORDS.characters)
    assert len(found["openings"]) == len(WORDS.characters) * len(WORDS.places)
    clip = client.get(found["openings"][4]["clip"].removeprefix("/api/v1/"))
    assert len(video.decode_mp4(clip.content)) == FRAMES
    for sheet in (found["portraits"], *found["places"].values()):
        picture = Image.open(
            io.BytesIO(client.get(sheet["address"].removeprefix("/api/v1/")).content)
        )
        assert picture.size == (144 * len(sheet["names"]), 96)
    for path in ("openings/clips/99.mp4", "openings/places/9.webp"):
        assert "no such" in refusal(client.get(path))["error"]


def test_a_game_begins_with_a_prepared_shot(client):
    state = new_game(client, character="Ren", place="beach", rules="day")
    (turn,) = state["turns"]
    assert turn["instruction"] == "Character: Ren; Motion: waving; Background: day beach."
    assert state["scene"] == {
        "character": "Ren", "motion": "waving", "partner": "", "time": "day", "place": "beach",
    }  # fmt: skip
    assert state["head"] == turn["id"]
    other = new_game(client, character="Ren", place="beach")
    assert (state["seed"], state["game"]) != (other["seed"], other["game"])
    assert new_game(client, character="Ren", place="beach", seed=5)["seed"] == 5
    assert play(client, state["game"])["turn"] == 2
    error = refusal(client.post("games", json={"character": "Ren", "place": "moon"}))["error"]
    assert error == "no first shot of 'Ren' in 'moon' is prepared"


def test_turns_and_their_files(client):
    game = new_game(client, seed=120)["game"]
    turn = play(client, game, "Mika is waving", level=5)
    assert turn["changes"] == {"stamina": -5, "social": 5, "entertainment": 0}
    assert turn["meters"] == {"stamina": 45, "social": 55, "entertainment": 50}
    assert (turn["motion_level"], turn["chosen_level"], turn["seed"], turn["after"]) == (
        5, True, 120, "",
    )  # fmt: skip
    clip = client.get(turn["clip"].removeprefix("/api/v1/"))
    assert clip.headers["content-type"] == "video/mp4"
    assert len(video.decode_mp4(clip.content)) == FRAMES
    part = client.get(turn["clip"].removeprefix("/api/v1/"), headers={"range": "bytes=0-99"})
    assert (part.status_code, len(part.content)) == (206, 100)
    picture = client.get(turn["picture"].removeprefix("/api/v1/"))
    assert Image.open(io.BytesIO(picture.content)).size == (216, 144)
    second = play(client, game, "running")
    assert second["after"] == turn["id"]
    film = video.decode_mp4(client.get(f"games/{game}/film.mp4").content)
    plain = video.decode_mp4(client.get(f"games/{game}/film.mp4?captions=false").content)
    assert len(film) == len(plain) == 2 * FRAMES
    assert (film[:, :120] == plain[:, :120]).mean() > 0.9
    assert film[:, -40:].max() > 200 > plain.max()
    gif = Image.open(io.BytesIO(client.get(f"games/{game}/film.gif").content))
    assert (gif.n_frames, gif.info["loop"]) == (1, 0) or gif.n_frames > 1
    card, japanese = (
        client.get(f"games/{game}/card.png?language={language}").content
        for language in ("en", "ja")
    )
    assert Image.open(io.BytesIO(card)).width > 500
    assert card != japanese
    assert client.get(f"games/{game}/card.png?language=xx").status_code == 422
    for path, message in (
        (f"games/{game}/clips/game.mp4", "no turn 'game' in this game"),
        (f"games/{game}/clips/..%2Fgame.mp4", ""),
        (f"games/{game}/pictures/start.png", "did not start from a picture"),
        ("games/0123/clips/turn_001.mp4", "no game '0123' here"),
    ):
        answer = client.get(path)
        assert answer.status_code in (404, 422)
        assert message in answer.text
    empty = new_game(client)["game"]
    for kind in ("film.mp4", "film.gif", "card.png", "game.zip"):
        assert "no turns yet" in refusal(client.get(f"games/{empty}/{kind}"))["error"]


def test_a_small_picture_is_asked_for_by_two_windows_at_once(client):
    game = new_game(client)["game"]
    address = play(client, game)["picture"].removeprefix("/api/v1/")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: client.get(address), range(8)))
    assert {answer.status_code for answer in found} == {200}
    assert len({answer.content for answer in found}) == 1


def test_a_game_is_a_tree_of_which_nothing_is_lost(client):
    game = new_game(client)["game"]
    first, second, third = (play(client, game, text)["id"] for text in ("one", "two", "three"))
    take = ok(client.post(f"games/{game}/again", json={"seed": 7}))
    assert (take["turn"], take["seed"], take["after"]) == (3, 7, second)

    def post(path: str, **body: Any) -> dict:
        return ok(client.post(f"games/{game}/{path}", json=body))

    state = post("undo")
    assert (turns(state), state["redo"]) == ([first, second], take["id"])
    assert {turn["id"] for turn in state["others"]} == {third, take["id"]}
    state = post("go", turn=third)
    assert turns(state) == [first, second, third]
    state = post("go", turn=first)
    branch = play(client, game, "another")
    state = ok(client.get(f"games/{game}"))
    assert turns(state) == [first, branch["id"]]
    assert len(state["others"]) == 3
    assert turns(post("go", turn="")) == []
    assert turns(post("redo")) == [first]
    for path, body, message in (
        ("go", {"turn": "nowhere"}, "no turn with the clip 'nowhere.mp4'"),
        ("copy", {"turns": 9}, "branch: expected 0 to"),
    ):
        assert message in refusal(client.post(f"games/{game}/{path}", json=body))["error"]
    copy = ok(client.post(f"games/{game}/copy", json={"turns": 1}), 201)
    assert (len(copy["turns"]), copy["others"]) == (1, [])
    archive = client.get(f"games/{game}/game.zip").content
    assert "turn_003_2.mp4" in zipfile.ZipFile(io.BytesIO(archive)).namelist()
    loaded = ok(client.post("games/archive", files={"archive": ("g.zip", archive)}), 201)
    assert len(loaded["others"]) == 4
    assert loaded["game"] != game
    bad = client.post("games/archive", files={"archive": ("g.zip", b"no zip")})
    assert "damaged zip" in refusal(bad)["error"]


def test_two_windows_of_a_game_agree(client):
    game = new_game(client)["game"]
    head = play(client, game, "one")["id"]
    play(client, game, "two", head=head)
    for path, body in (
        ("turns", {"instruction": "other", "head": head}),
        ("undo", {"head": head}),
        ("again", {"head": ""}),
        ("meters", {"head": head, "meters": {"stamina": 1, "social": 1, "entertainment": 1}}),
    ):
        method = "PUT" if path == "meters" else "POST"
        found = refusal(client.request(method, f"games/{game}/{path}", json=body), 409)
        assert found["code"] == "conflict"
    assert len(ok(client.get(f"games/{game}"))["turns"]) == 2


def test_a_line_of_unknown_words_is_not_played_silently(client):
    game = new_game(client)["game"]
    found = ok(client.post("read", json={"text": "Xen xeats in the xown with Mika"}))
    assert [(w["word"], w["near"][:1]) for w in found["unknown"]] == [
        ("xeats", ["waving"]),
        ("xown", ["town"]),
    ]
    assert found["understood"]
    line = "xeats xramen on the xoon"
    found = refusal(client.post(f"games/{game}/turns", json={"instruction": line, "anyway": False}))
    assert found["code"] == "unknown words"
    assert [word["word"] for word in found["reading"]["unknown"]] == ["xeats", "xramen", "xoon"]
    assert play(client, game, line)["unknown"] == ["xeats", "xramen", "xoon"]
    assert ok(client.post("read", json={"text": "word " * 60}))["error"] != ""
    assert ok(client.post("read", json={"text": " "})) == {
        "understood": True, "unknown": [], "error": "",
    }  # fmt: skip


def test_meters_are_set_before_a_turn(client, player):
    game = new_game(client)["game"]
    play(client, game, "one")
    wanted = {"stamina": 90, "social": 20, "entertainment": 50}
    state = ok(client.put(f"games/{game}/meters", json={"meters": wanted}))
    assert state["meters"] == state["turns"][-1]["set_meters"] == wanted
    assert play(client, game, "two")["meters"]["stamina"] == 85
    wrong = client.put(f"games/{game}/meters", json={"meters": {**wanted, "stamina": 101}})
    assert refusal(wrong)["error"].startswith("meters.stamina: Input should be less than")


def test_a_day_ends_and_the_next_begins(client):
    game = new_game(client, seed=0, rules="day")["game"]
    for number in range(10):
        assert play(client, game, f"turn {number}")
    state = ok(client.get(f"games/{game}"))
    assert (state["day"]["ending"], state["day"]["played"]) == ("exhausted", 10)
    assert state["meters"]["stamina"] == 0
    error = refusal(client.post(f"games/{game}/turns", json={"instruction": "on"}))["error"]
    assert error.startswith("the day is over")
    state = ok(client.post(f"games/{game}/day", json={}))
    assert (state["day"]["number"], state["day"]["played"], state["day"]["ending"]) == (2, 0, None)
    assert state["meters"]["stamina"] == 50
    tired = {"meters": {"stamina": 0, "social": 50, "entertainment": 50}}
    error = refusal(client.put(f"games/{game}/meters", json=tired))["error"]
    assert error.startswith("stamina 0 would end a day")
    assert play(client, game, "on")["turn"] == 11
    card = client.get(f"games/{game}/card.png")
    assert card.headers["content-type"] == "image/png"
    state = ok(client.put(f"games/{game}/rules", json={"rules": "off"}))
    assert state["day"] is None
    assert "no day to end" in refusal(client.post(f"games/{game}/day", json={}))["error"]


def test_a_game_from_a_picture(client, tmp_path):
    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), "red").save(buffer, "PNG")
    files = {"picture": ("hero.png", buffer.getvalue())}
    form = {"text": "Character: Hana; Background: town."}
    state = ok(client.post("games/picture", files=files, data=form), 201)
    assert state["picture"]["instruction"] == form["text"]
    assert state["scene"]["character"] == "Hana"
    picture = client.get(state["picture"]["picture"].removeprefix("/api/v1/"))
    assert Image.open(io.BytesIO(picture.content)).size == (360, 240)
    for sent, text, message in (
        (files, " ", "hero.png: expected a text with the picture"),
        ({"picture": ("a.png", b"x")}, "Hana", "a.png: expected a picture"),
    ):
        found = refusal(client.post("games/picture", files=sent, data={"text": text}))
        assert message in found["error"]
        assert str(tmp_path) not in found["error"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": "abc"}, "seed: Input should be a valid integer"),
        ({"seed": "-1"}, "seed: expected a whole number, 0 to "),
        ({"seed": "9" * 4300}, "seed: "),
        ({"rules": "none"}, "rules: Input should be 'off' or 'day'"),
    ],
)
def test_wrong_fields_with_a_picture_are_one_line(client, fields, message):
    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), "red").save(buffer, "PNG")
    files = {"picture": ("hero.png", buffer.getvalue())}
    form = {"text": "Character: Hana; Background: town.", **fields}
    found = refusal(client.post("games/picture", files=files, data=form))
    assert found["error"].startswith(message)


def test_a_list_of_games_has_only_those_that_are_asked_for(client):
    games = [new_game(client)["game"] for _ in range(3)]
    play(client, games[1], "one")
    found = ok(client.get("games", params={"ids": ",".join([games[1], "0" * 24, games[2]])}))
    assert [(one["game"], one["turns"], one["title"]) for one in found] == [
        (games[1], 1, "one"),
        (games[2], 0, ""),
    ]
    assert ok(client.get("games")) == []


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("games", {"seed": "x"}, "seed: Input should be a valid integer"),
        ("games", {"seed": -1}, "seed: expected a whole number, 0 to 2147483647, found -1"),
        ("games", {"window": 6}, "window: expected a whole number, 1 to 5, found 6"),
        ("games", {"other": 1}, "other: Extra inputs are not permitted"),
        ("games", [], "body: Input should be"),
        ("games/{game}/turns", {"instruction": ""}, "expected an instruction, found nothing"),
        ("games/{game}/turns", {"instruction": "x" * 600}, "at most 500 characters, found 600"),
        ("games/{game}/turns", {"instruction": "a\u0000b"}, "a control character"),
        ("games/{game}/turns", {"instruction": "wave", "level": 9}, "motion level 9: expected"),
        ("games/{game}/turns", {}, "instruction: Field required"),
        ("games/{game}/undo", {}, "no turn to undo"),
        ("games/{game}/again", {}, "no turn to try again"),
        ("games/nowhere/turns", {"instruction": "wave"}, "no game 'nowhere' here"),
        ("games/..%2Fetc/turns", {"instruction": "wave"}, ""),
    ],
)
def test_what_is_refused(client, path, body, message):
    game = new_game(client)["game"]
    answer = client.post(path.replace("{game}", game), json=body)
    assert answer.status_code in (404, 422)
    assert message in answer.text
    assert (answer.json().get("code") == "no game") == message.startswith("no game")
    assert "Traceback" not in answer.text


def test_internal_errors_say_nothing_of_the_server(client, actions, monkeypatch, caplog):
    monkeypatch.setattr(actions.store, "new", lambda **_: 1 / 0)
    found = refusal(client.post("games", json={}), 500)
    assert found == {"code": "internal", "error": found["error"], "reading": None}
    assert "ZeroDivisionError" in caplog.text


def test_only_for_those_who_may(client):
    def nobody(request: Any) -> str:
        raise LoginError

    client.app.state.client_of = nobody
    for path in ("server", "games", "games/x", "games/x/events", "openings/clips/0.mp4"):
        assert refusal(client.get(path), 401)["code"] == "login"
    assert refusal(client.post("games", json={}), 401)["code"] == "login"


def test_the_description_has_every_answer(client):
    found = ok(client.get("openapi.json"))
    assert len(found["paths"]) > 25
    for path, method in itertools.chain.from_iterable(
        ((path, one) for one in methods.items()) for path, methods in found["paths"].items()
    ):
        assert path.startswith("/api/v1/")
        assert method[1]["description"]
        (good,) = (answer for status, answer in method[1]["responses"].items() if status < "3")
        content = good.get("content", {})
        if "application/json" in content:
            assert content["application/json"]["schema"] != {}, (path, method[0])
    for path in ("games/{game}/events", "games/{game}/turns", "games/{game}/again"):
        (operation,) = found["paths"][f"/api/v1/{path}"].values()
        streams = operation["responses"]["200"]["content"]["text/event-stream"]
        assert streams["schema"] == {"$ref": "#/components/schemas/EventsModel"}
    assert "FirstPictureModel" in found["components"]["schemas"]
    kinds = {name for name in dir(models) if name.endswith("Model") and name != "BaseModel"}
    assert {"GameModel", "TurnModel", "ErrorModel", "ServerModel"} <= kinds


def test_files_of_the_page_are_small_and_asked_for_again(client):
    root = "http://test/"
    sizes = {}
    scripts = [path.name for path in (Path(page.__file__).with_name("files")).glob("*.js")]
    assert len(scripts) > 5
    files = ("style.css", "lang/ja.json", *scripts)
    for path in ("", "api", *(f"assets/{name}" for name in files)):
        answer = client.get(root + path)
        assert answer.status_code == 200
        assert answer.headers["content-encoding"] == "gzip", path
        sizes[path] = int(answer.headers["content-length"])
        again = client.get(root + path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        plain = client.get(root + path, headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.text == answer.text
    assert sum(sizes.values()) < 60_000, sizes
    assert client.get(root + "assets/../page.py").status_code == 404
    assert client.get(root + "assets/nothing.js").status_code == 404


def test_meters_of_the_models_are_those_of_a_game():
    from animegamer_jax.game.saved.turns import METERS, Meters

    names = {field.name for field in dataclasses.fields(Meters)}
    assert set(models.MetersModel.model_fields) == names == set(METERS)
