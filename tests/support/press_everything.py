"""Calls every handler of the page once: `python tests/support/press_everything.py GAMES`."""

import sys
from pathlib import Path

import gradio as gr
from fake_player import MODEL, FakePlayer

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.serve.engine import Engine
from animegamer_jax.serve.game_store import GameStore
from animegamer_jax.serve.page import Page


def press_everything(page: Page) -> None:
    """Plays, repeats, undoes, branches, saves and loads; asserts what the page then shows."""
    settings = (0, 0, 5, 2)  # motion level, seed, window, steps

    def status(updates: list) -> str:
        return updates[6]

    began, played = page.on_line("", "wave", *settings)
    name = played[0]
    assert (began[0], began[-1]) == (name, "")
    assert "wave" in played[3]
    *_, played = page.on_fields(name, "Mika", "gently", "waving", None, "town", *settings)
    assert "Character: Mika; Motion: gently waving; Background: town." in played[3]
    *_, played = page.on_again(name, *settings)
    assert "turn 2 of 2" in played[3]
    first = gr.SelectData(None, {"index": 0, "value": None})
    assert "turn 1 of 2" in page.on_select(name, first)[3]
    branch = page.on_branch(name, 1)
    assert "continues after turn 1" in status(branch)
    assert branch[0] != name
    assert "undone" in status(page.on_undo(name))
    assert "Nothing is being played" in page.on_stop(name)
    assert "Welcome back" in status(next(page.on_load(name)))
    path, text = page.on_save(name)
    assert "download" in text
    assert "loaded" in status(page.on_upload(path))
    assert "cannot be played" in status(page.on_upload(__file__))
    (refused,) = page.on_line(name, "", *settings)
    assert "found nothing" in status(refused)
    assert "no game yet" in status(page.on_undo(""))
    assert "A new game." in status(page.on_new(0, 5, 2))


if __name__ == "__main__":
    engine = Engine(FakePlayer(), GameStore(Path(sys.argv[1]), model=MODEL))
    try:
        page = Page(engine, vocabulary=Vocabulary(), steps=2)
        page.build()
        press_everything(page)
    finally:
        engine.close()
