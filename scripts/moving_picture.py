"""Makes a moving picture of a played game, for the README: clips with their instructions.

animegamer play --instructions animegamer_jax/assets/instructions/toy.txt --out out/play
python scripts/moving_picture.py out/play docs/images/game.webp
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from animegamer_jax.media.video import FRAMES_PER_SECOND, read_mp4

_WIDTH = 432
_CAPTION = 54  # height of the text below
_PAPER, _INK, _SOFT = (246, 246, 243), (34, 37, 44), (122, 126, 136)


def frames_of(game: Path, turns: list[int]) -> Iterator[Image.Image]:
    """Yields the frames of some turns, each with its instruction and meters below."""
    played = {turn["turn"]: turn for turn in json.loads((game / "game.json").read_text())["turns"]}
    for number in turns:
        turn = played[number]
        meters = ", ".join(f"{name} {value}" for name, value in turn["meters"].items())
        for frame in read_mp4(game / turn["clip"]):
            yield _drawn(frame, f"{number}. {turn['instruction']}", meters)


def _drawn(frame: np.ndarray, instruction: str, meters: str) -> Image.Image:
    width, height = _WIDTH, _WIDTH * frame.shape[0] // frame.shape[1]
    clip = Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS)
    picture = Image.new("RGB", (width, height + _CAPTION), _PAPER)
    picture.paste(clip, (0, 0))
    draw = ImageDraw.Draw(picture)
    room = width - 20
    size = next(n for n in range(16, 5, -1) if _font(n).getlength(instruction) <= room or n == 6)
    draw.text((10, height + 8), instruction, _INK, font=_font(size))
    draw.text((10, height + 32), meters, _SOFT, font=_font(12))
    return picture


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def main() -> None:
    """Parses the command line and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("game", type=Path, help="folder of a played game")
    parser.add_argument("out", type=Path, help="file to write: .webp, .png or .gif")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 3, 5, 8])
    options = parser.parse_args()
    first, *others = frames_of(options.game, options.turns)
    first.save(
        options.out,
        save_all=True,
        append_images=others,
        duration=1000 // FRAMES_PER_SECOND,
        loop=0,
        **({"quality": 78, "method": 2} if options.out.suffix == ".webp" else {}),
    )
    size = options.out.stat().st_size / 1e6
    print(
        f"{options.out}: {1 + len(others)} frames of {first.width} x {first.height}, {size:.2f} MB"
    )


if __name__ == "__main__":
    main()
