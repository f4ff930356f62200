"""Pieces of the page: HTML of the meters, a turn and its progress; thumbnails of turns.

All of a player's text is escaped: it is shown, never run.
"""

import html
from pathlib import Path

from etils import epath
from PIL import Image

from animegamer_jax.game.saved_game import Game, Meters, Turn
from animegamer_jax.media import video
from animegamer_jax.serve.engine.engine import TurnRequest
from animegamer_jax.storage.files import replacing

_METERS = ("stamina", "social", "entertainment")
_THUMB_ROWS = 144
_STAGES = {
    "mllm": "predicting the game state",
    "decoder": "drawing the shot",
    "vae": "decoding the frames",
}

CSS = """
.gradio-container { width: 100%; max-width: 1120px !important; margin: 0 auto !important; }
#clip video { object-fit: contain; background: #000; border-radius: 10px; }
#board .grid-wrap { min-height: 0; max-height: 26em; overflow-y: auto; }
#board .grid-container { grid-template-columns: repeat(auto-fill, minmax(84px, 1fr));
  grid-template-rows: auto; grid-auto-rows: auto; }
#board .thumbnail-item { aspect-ratio: 3 / 2; }
#board .caption-label { right: 0; bottom: 0; padding: 0 .5em; font-size: .75em; }
.ag-meter { display: grid; grid-template-columns: 8em 1fr 2.2em 2.4em; gap: .6em;
  align-items: center; margin: .35em 0; font-variant-numeric: tabular-nums; }
.ag-track { height: .8em; border-radius: .4em; overflow: hidden;
  background: var(--border-color-primary); }
.ag-track > div { height: 100%; border-radius: .4em; transition: width .8s ease; }
.ag-stamina { background: #e28a3a; } .ag-social { background: #4a86ce; }
.ag-entertainment { background: #9662be; }
.ag-up { color: #14804f; } .ag-down { color: #c3392f; }
.dark .ag-up { color: #4ad08f; } .dark .ag-down { color: #ff7d72; }
.ag-said { font-size: 1.05em; margin: .2em 0 .6em; overflow-wrap: anywhere; }
.ag-soft { color: var(--body-text-color-subdued); font-size: .9em; }
.ag-pip { display: inline-block; width: .7em; height: .7em; border-radius: 50%;
  margin-right: .25em; border: 1px solid var(--body-text-color-subdued); }
.ag-pip.on { background: #5b70d6; border-color: #5b70d6; }
.ag-status { min-height: 1.5em; } .ag-status.bad { color: #b3261e; }
.dark .ag-status.bad { color: #ff8a80; }
.ag-bar { height: .45em; border-radius: .3em; background: var(--border-color-primary);
  margin-top: .4em; overflow: hidden; }
.ag-bar > div { height: 100%; background: #5b70d6; transition: width .3s linear; }
@media (max-width: 640px) { .ag-meter { grid-template-columns: 7.4em 1fr 2em 2.2em; } }
"""


def meters(now: Meters, turn: Turn | None) -> str:
    """Returns the three meters, with the changes of the turn."""
    rows = []
    for name in _METERS:
        value = getattr(now, name)
        change = turn.changes[name] if turn else 0
        kind = "ag-up" if change > 0 else "ag-down" if change < 0 else "ag-soft"
        sign = f"{change:+d}" if change else ""
        rows.append(
            f'<div class="ag-meter" data-meter="{name}" data-value="{value}">'
            f"<span>{name.capitalize()}</span>"
            f'<div class="ag-track" role="meter" aria-label="{name}" aria-valuemin="0" '
            f'aria-valuemax="100" aria-valuenow="{value}">'
            f'<div class="ag-{name}" style="width:{value}%"></div></div>'
            f'<span>{value}</span><span class="{kind}">{sign}</span></div>'
        )
    return "".join(rows)


def describe(
    turn: Turn | None, total: int, *, picture: str = "", unknown: tuple[str, ...] = ()
) -> str:
    """Returns a turn's instruction, motion level, seed and time; before the first, what to do.

    Args:
        turn: The turn; None before the first.
        total: Number of turns of the game.
        picture: Text of the player's own picture.
        unknown: Words of the instruction that the model does not know.
    """
    if turn is None:
        begun = ""
        if picture:
            begun = (
                f'<div class="ag-said" dir="auto">{html.escape(picture)}</div>'
                '<div class="ag-soft">The game starts from your picture.</div>'
            )
        return (
            f'{begun}<div class="ag-soft">No turn yet: say who does what, how, when and where.'
            "</div>"
        )
    pips = "".join(
        f'<span class="ag-pip{" on" if level <= turn.motion_level else ""}"></span>'
        for level in range(1, 6)
    )
    chosen = " (set by you)" if turn.chosen_level else ""
    note = ""
    if unknown:
        words = ", ".join(html.escape(word) for word in unknown)
        note = f'<div class="ag-soft">The model does not know: {words}</div>'
    return (
        f'<div class="ag-said" dir="auto">{html.escape(turn.instruction)}</div>{note}'
        f'<div class="ag-soft">turn {turn.turn} of {total} &middot; motion {pips} '
        f"{turn.motion_level}{chosen} &middot; seed {turn.seed} &middot; "
        f"{turn.seconds['total']:.1f} s</div>"
    )


def progress(request: TurnRequest, position: int) -> str:
    """Returns a turn's position in the queue, or its denoising step and the time left."""
    if request.status == "waiting":
        ahead = "you are next" if position == 0 else f"{position} before you"
        return status(f"In the queue: {ahead}.")
    left = request.seconds_left
    text = _STAGES.get(request.stage, "starting").capitalize()
    if request.stage == "decoder":
        text += f", step {request.step} of {request.num_steps}"
    if left is not None and left > 0.05:
        text += f", {left:.0f} s left" if left >= 1 else ", almost there"
    share = request.step / request.num_steps if request.stage == "decoder" else 0
    share = 1.0 if request.stage == "vae" else share
    return status(f"{text}.", share=share)


def status(text: str, *, bad: bool = False, share: float | None = None) -> str:
    """Returns a line that screen readers read out, with a bar if `share` is given."""
    bar = ""
    if share is not None:
        bar = f'<div class="ag-bar"><div style="width:{100 * share:.0f}%"></div></div>'
    kind = " bad" if bad else ""
    return (
        f'<div class="ag-status{kind}" role="status" aria-live="polite" dir="auto">'
        f"{html.escape(text)}{bar}</div>"
    )


def thumbnail(game: Game, turn: Turn) -> Path:
    """Returns a small picture of a clip's middle frame, which is written on the first call."""
    clip = game.folder / turn.clip
    path = clip.with_suffix(".jpg")
    # After an undo, another turn may have the same name.
    if not path.exists() or path.stat().st_mtime_ns < clip.stat().st_mtime_ns:
        frames = video.read_mp4(clip)
        picture = Image.fromarray(frames[len(frames) // 2])
        size = round(picture.width * _THUMB_ROWS / picture.height), _THUMB_ROWS
        small = picture.resize(size, Image.Resampling.LANCZOS)
        with replacing(epath.Path(path)) as file:
            small.save(file, "JPEG", quality=85)
    return path
