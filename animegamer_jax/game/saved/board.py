"""The storyboard of a game: its picture and its last turns, drawn from the files on disk."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from animegamer_jax.game.saved.game_file import PICTURE_FILE
from animegamer_jax.game.saved.turns import METERS, Meters, PictureTurn, Turn
from animegamer_jax.media import storyboard, video
from animegamer_jax.media.pictures import read_picture


def draw_board(
    folder: Path, turns: Sequence[Turn], *, picture: PictureTurn | None, title: str, settings: str
) -> bytes:
    """Draws a game's storyboard as a PNG file.

    Args:
        folder: Folder of the game.
        turns: Its turns; the last of them are shown.
        picture: Turn of the player's own picture; None if there is none.
        title: Name of the model.
        settings: Rest of the note, after the number of turns.

    Raises:
        UserError: A file cannot be read.
    """
    shown = turns[-storyboard.MAX_PANELS :]
    panels = [_panel(folder, turn) for turn in shown]
    if picture is not None and len(panels) < storyboard.MAX_PANELS:
        panels.insert(0, _picture_panel(folder, picture))
    count = f"{len(turns)} turn" + "s" * (len(turns) != 1)
    if len(shown) < len(turns):
        count = f"turns {shown[0].turn} to {shown[-1].turn} of {count}"
    return storyboard.storyboard(panels, title=title, note=f"{count}  ·  {settings}")


def _panel(folder: Path, turn: Turn) -> storyboard.Panel:
    return storyboard.Panel(
        turn=turn.turn,
        instruction=turn.instruction,
        frames=video.pick_frames(video.read_mp4(folder / turn.clip)),
        motion_level=turn.motion_level,
        changes=turn.changes,
        meters=dataclasses.asdict(turn.meters),
    )


def _picture_panel(folder: Path, picture: PictureTurn) -> storyboard.Panel:
    """Returns the panel of the player's own picture, with the meters of the start."""
    pixels = read_picture(folder / PICTURE_FILE).pixels
    blank = np.full_like(pixels, 255)  # so that its text is under those of the clips
    return storyboard.Panel(
        turn=0,
        instruction=picture.instruction,
        frames=np.stack([pixels, blank, blank, blank]),
        motion_level=picture.motion_level,
        changes=dict.fromkeys(METERS, 0),
        meters=dataclasses.asdict(Meters()),
    )
