"""The storyboard: a card per turn with frames, instruction, states and meters, as one PNG."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from animegamer_jax.media.fonts import fit_text, font_for, wrap_text

MAX_PANELS = 60
_PAPER, _CARD, _EDGE = (246, 246, 243), (255, 255, 255), (228, 228, 223)
_INK, _SOFT, _TRACK = (34, 37, 44), (122, 126, 136), (233, 234, 236)
_UP, _DOWN = (31, 138, 91), (204, 73, 63)
_ACCENT = (74, 94, 190)
_METER_INKS = {"stamina": (226, 138, 58), "social": (74, 134, 206), "entertainment": (150, 98, 190)}
_SCALE = 2  # cards are drawn at twice their size and halved, which smooths corners and bars
_FRAME_BOX = (216, 200)
_TEXT_WIDTH, _METERS_WIDTH = 372, 330
_LABELLED = re.compile(r"\s*([^:;]{1,14}):\s*([^;]*?)[\s.]*(?:;|$)")

Number = int | float


class Panel(NamedTuple):
    """One turn on the storyboard.

    `frames` are the three or four frames to show. `changes` and `meters` have the same names, in
    the order of drawing; changes are signed steps, meters run from 0 to 100.
    """

    turn: int
    instruction: str
    frames: UInt8[np.ndarray, "k h w 3"]
    motion_level: int
    changes: Mapping[str, int]
    meters: Mapping[str, int]


def storyboard(panels: Sequence[Panel], *, title: str = "Game", note: str = "") -> bytes:
    """Draws a game at a glance, as a PNG: one row a turn, in up to three columns.

    Of a longer game the last `MAX_PANELS` turns are drawn.
    """
    omitted = max(0, len(panels) - MAX_PANELS)
    cards = [_card(panel) for panel in panels[omitted:]]
    columns = max(1, min(3, -(-len(cards) // 10)))
    rows = -(-len(cards) // columns)
    width = max((card.width for card in cards), default=900)
    height = max((card.height for card in cards), default=0)
    margin, gap, header = 48, 16, 92
    picture = Image.new(
        "RGB",
        (
            2 * margin + columns * width + (columns - 1) * 2 * gap,
            margin + header + rows * (height + gap) - gap * (rows > 0) + margin,
        ),
        _PAPER,
    )
    draw = ImageDraw.Draw(picture)
    if omitted:
        note = f"turns {omitted + 1} to {len(panels)}" + (f"  ·  {note}" if note else "")
    for text, size, top, ink in ((title, 34, margin - 10, _INK), (note, 18, margin + 38, _SOFT)):
        font = font_for(text, size)
        draw.text(
            (margin, top), fit_text(text, font, picture.width - 2 * margin), fill=ink, font=font
        )
    for index, card in enumerate(cards):
        column, row = divmod(index, rows)
        left = margin + column * (width + 2 * gap)
        picture.paste(card, (left, margin + header + row * (height + gap)))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _card(panel: Panel) -> Image.Image:
    """Draws one turn: number, frames, instruction, motion level and meters."""
    frame_height, frame_width = panel.frames.shape[1:3]
    zoom = min(_FRAME_BOX[0] / frame_width, _FRAME_BOX[1] / frame_height)
    size = max(1, round(frame_width * zoom)), max(1, round(frame_height * zoom))
    pad, gap, number = 18, 8, 64
    height = 2 * pad + max(144, size[1])
    text_left = number + len(panel.frames) * (size[0] + gap) - gap + 30
    meters_left = text_left + _TEXT_WIDTH + 30
    canvas = _Canvas(meters_left + _METERS_WIDTH + 24, height)
    canvas.box(0, 0, canvas.width - 1, height - 1, radius=14, fill=_CARD, edge=_EDGE)
    canvas.text(number / 2, height / 2, str(panel.turn), size=26, ink=_SOFT, anchor="mm")
    for index, frame in enumerate(panel.frames):
        canvas.picture(number + index * (size[0] + gap), (height - size[1]) / 2, frame, size=size)
    top = (height - 144) / 2
    _draw_instruction(canvas, text_left, top, panel.instruction)
    _draw_state(canvas, meters_left, top, panel)
    return canvas.finished()


def _draw_instruction(canvas: "_Canvas", left: Number, top: Number, instruction: str) -> None:
    """Draws labels and values in two columns if the text has that form, else wrapped text."""
    parts = _LABELLED.findall(instruction)
    labelled = len(parts) >= 2 and len(parts) == len(instruction.rstrip("; ").split(";"))
    lines: list[tuple[str, str]] = []
    indent = 100 if labelled else 0
    for label, value in parts if labelled else [("", instruction)]:
        wrapped = wrap_text(value, font_for(value, 19 * _SCALE), (_TEXT_WIDTH - indent) * _SCALE)
        lines += [(label if i == 0 else "", line) for i, line in enumerate(wrapped)]
    if len(lines) > 6:
        lines = [*lines[:5], (lines[5][0], lines[5][1] + " …")]
    pitch = 24
    top += (144 - pitch * len(lines)) / 2
    for index, (label, line) in enumerate(lines):
        y = top + (index + 0.5) * pitch
        canvas.text(left, y, label, size=15, ink=_SOFT)
        canvas.text(left + indent, y, line, size=19, ink=_INK, width=_TEXT_WIDTH - indent + 12)


def _draw_state(canvas: "_Canvas", left: Number, top: Number, panel: Panel) -> None:
    """Draws the motion level as five pips, then a bar for each meter with value and change."""
    bar_left, bar_right = left + 122, left + _METERS_WIDTH - 72
    right = left + _METERS_WIDTH
    y = top + 18
    canvas.text(left, y, "Motion level", size=15, ink=_SOFT)
    for pip in range(5):
        x = bar_left + pip * 19
        lit = pip < panel.motion_level
        canvas.box(x, y - 6, x + 13, y + 6, radius=4, fill=_ACCENT if lit else _TRACK)
    canvas.text(right - 36, y, str(panel.motion_level), size=17, ink=_INK, anchor="rm")
    for row, (name, meter) in enumerate(panel.meters.items(), start=1):
        y = top + 18 + row * 36
        change = panel.changes[name]
        canvas.text(left, y, name.capitalize(), size=15, ink=_SOFT)
        canvas.box(bar_left, y - 5, bar_right, y + 5, radius=5, fill=_TRACK)
        if meter > 0:
            end = bar_left + max(10, (bar_right - bar_left) * meter / 100)
            canvas.box(bar_left, y - 5, end, y + 5, radius=5, fill=_METER_INKS.get(name, _ACCENT))
        canvas.text(right - 36, y, str(meter), size=17, ink=_INK, anchor="rm")
        ink = _UP if change > 0 else _DOWN if change < 0 else _SOFT
        canvas.text(right, y, f"{change:+d}" if change else "0", size=15, ink=ink, anchor="rm")


class _Canvas:
    """A drawing in final pixels, kept at `_SCALE` times the resolution."""

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self.image = Image.new("RGB", (width * _SCALE, height * _SCALE), _PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def box(
        self,
        left: Number,
        top: Number,
        right: Number,
        bottom: Number,
        *,
        radius: Number,
        fill,
        edge=None,
    ) -> None:
        corners = [value * _SCALE for value in (left, top, right, bottom)]
        self.draw.rounded_rectangle(
            corners, radius * _SCALE, fill=fill, outline=edge, width=_SCALE if edge else 0
        )

    def text(
        self,
        x: Number,
        y: Number,
        text: str,
        *,
        size: int,
        ink,
        anchor: str = "lm",
        width: Number = 0,
    ) -> None:
        font = font_for(text, size * _SCALE)
        if width:
            text = fit_text(text, font, width * _SCALE)
        self.draw.text((x * _SCALE, y * _SCALE), text, fill=ink, font=font, anchor=anchor)

    def picture(self, x: Number, y: Number, frame: np.ndarray, *, size: tuple[int, int]) -> None:
        width, height = size[0] * _SCALE, size[1] * _SCALE
        picture = Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS)
        mask = Image.new("L", (width, height))
        ImageDraw.Draw(mask).rounded_rectangle((0, 0, width - 1, height - 1), 8 * _SCALE, fill=255)
        self.image.paste(picture, (round(x * _SCALE), round(y * _SCALE)), mask)

    def finished(self) -> Image.Image:
        return self.image.reduce(_SCALE)
