"""Calls every handler of the page once: `python tests/support/press_everything.py GAMES`."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gradio as gr
from fake_player import MODEL, FakePlayer
from PIL import Image

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.serve import view
from animegamer_jax.serve.engine.engine import Engine
from animegamer_jax.serve.games.game_store import GameStore
from animegamer_jax.serve.page import Page


def press_everything(page: Page) -> None:
    """Plays, repeats, undoes, branches, saves and loads; asserts what the page then shows."""
    settings = (0, 0, 5, 2)  # motion level, seed, window, steps

    def status(updates: list) -> str:
        return updates[6]

    began, *_, played = page.on_line("", "wave", *settings)
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
    with ThreadPoolExecutor(8) as pool:
        assert all(Path(found).is_file() for found in pool.map(page.pack, [name] * 8))
    assert "loaded" in status(page.on_upload(path))
    assert not Path(path).exists()
    assert "cannot be played" in status(page.on_upload(__file__))
    (refused,) = page.on_line(name, "", *settings)
    assert "found nothing" in status(refused)
    assert "no game yet" in status(page.on_undo(""))
    assert "A new game." in status(page.on_new(0, 5, 2))
    press_pictures(page)


def press_pictures(page: Page) -> None:
    """Starts a game from a picture and plays it; asserts what the page then shows."""
    folder = page.store.folder.parent
    Image.new("RGB", (48, 32), "red").save(folder / "hero.png")
    frames = [Image.new("RGB", (48, 32), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "hero.gif", save_all=True, append_images=frames[1:])

    def new(path: Path | None, text: str, *, window: int = 5) -> list:
        return page.on_new_from_picture(path and str(path), text, 0, window, 2)

    begun = new(folder / "hero.png", "Hana <b>stands</b>.")
    name = begun[0]
    assert begun[6] == view.status("A new game from your picture.")
    assert "Hana &lt;b&gt;stands&lt;/b&gt;." in begun[3]
    assert "No turn yet" in begun[3]
    *_, played = page.on_line(name, "wave", 0, 0, 5, 2)
    assert [card["caption"] for card in played[5].value] == ["picture", "turn 1"]
    assert played[5].selected_index == 1
    shown = [page.on_select(name, gr.SelectData(None, {"index": n, "value": 0})) for n in (0, 1)]
    assert "Your picture, from which" in shown[0][6]
    assert "turn 1 of 1" in shown[1][3]
    assert "several pictures: the first is used" in new(folder / "hero.gif", "Hana")[6]
    for updates, message in (
        (new(None, "Hana"), "expected a picture, found no file"),
        (new(folder / "hero.png", " "), "hero.png: expected a text with the picture"),
        (new(folder / "hero.png", "x" * 501), "at most 500 characters, found 501"),
        (new(folder / "hero.png", "Hana", window=1), "window 1: it holds no past turn"),
        (new(Path(__file__), "Hana"), "press_everything.py: expected a picture"),
    ):
        assert message in updates[6], updates[6]
        assert str(folder) not in updates[6]


if __name__ == "__main__":
    engine = Engine(FakePlayer(), GameStore(Path(sys.argv[1]), model=MODEL))
    try:
        page = Page(engine, vocabulary=Vocabulary(), steps=2)
        page.build()
        press_everything(page)
    finally:
        engine.close()
