"""Calls of the API over HTTP, whose answers are checked for their status."""

from typing import Any

from fastapi.testclient import TestClient


def ok(answer: Any, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


def refusal(answer: Any, status: int = 422) -> dict:
    found = ok(answer, status)
    assert "\n" not in found["error"]
    return found


def new_game(client: TestClient, **wanted: Any) -> dict:
    return ok(client.post("games", json=wanted), 201)


def play(client: TestClient, game: str, text: str = "wave", **wanted: Any) -> dict:
    return ok(client.post(f"games/{game}/turns", json={"instruction": text, **wanted}))
