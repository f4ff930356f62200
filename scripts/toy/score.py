"""Plays held-out games of the toy world with a model, scores them, and shows them beside the truth.

    python scripts/toy/score.py MODEL --split test --games 100 --out scores.json

prints a table and writes `scores.json` and `scores.png`, the first game with its truth beneath.
Characters, places and times are read off the clips by the best of several readers, each checked on
true clips first; a row whose reader is right less than 99 times in 100 is marked with `?`.
"""

import functools
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.config import to_json
from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.configs import ShotEncoderConfig
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder
from animegamer_jax.game.player import Player
from animegamer_jax.media.video import pick_frames
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.models.vae import VAE
from animegamer_jax.progress import show_progress
from animegamer_jax.storage.files import write_whole
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.toy.scoring.classifiers import ChosenReaders, make_readers
from animegamer_jax.toy.scoring.scores import (
    PlayedGames,
    Scores,
    Table,
    play_games,
    score,
    true_representations,
)
from animegamer_jax.toy.scoring.truth import (
    Truth,
    make_truth,
    reconstruct,
)
from animegamer_jax.toy.world import Split, make_game

# Figures of the paper's table, on its own task, to stand beside ours.
PAPER = {"CLIP-I": 0.8132, "CLIP-T": 0.4161, "ACC-F": 0.6744, "MAE-F": 0.4238}
PAPER |= {"ACC-S": 0.6773, "MAE-S": 0.5872}
_LEAST_READER_CLIPS = 24  # three of each character


class Setting(NamedTuple):
    """Games to score, number `first_seed` and those after it, and what judges them.

    `embedder` is None where the model has no CLIP.
    """

    first_seed: int
    truth: Truth
    reader: ChosenReaders
    embedder: ClipEmbedder | None
    vae: VAE

    @property
    def seeds(self) -> range:
        """The games' numbers, which are also their seeds in play."""
        return range(self.first_seed, self.first_seed + len(self.truth.games))


def set_up(
    bundle: Bundle,
    *,
    split: Split,
    games: int,
    turns: int,
    seed: int,
    reader_clips: int,
) -> Setting:
    """The truth of games number `seed`, `seed + 1`, ... of a split, at the model's size.

    It is the same for all models that have this one's CLIP, VAE and size.

    Args:
        bundle: the model.
        split: held-out games.
        games: how many.
        turns: of each.
        seed: number of the first.
        reader_clips: true clips that the readers learn from; a third as many check them.
    """
    print("rendering the truth, checking the readers", file=sys.stderr)
    d, v = bundle.config.dit, bundle.config.vae
    if d is None or v is None:
        raise UserError(f"{bundle.path}: expected a model with the networks dit and vae")
    size = {
        "height": d.latent_height * v.spatial_compression,
        "width": d.latent_width * v.spatial_compression,
        "num_frames": 1 + (d.latent_frames - 1) * v.temporal_compression,
    }
    vae = cast(VAE, bundle.load("vae"))
    embedder = None
    if bundle.has("clip"):
        embedder = ClipEmbedder(cast(CLIP, bundle.load("clip")), _tokenizer(bundle))
    reader = make_readers(
        embedder,
        **size,
        reconstruct=functools.partial(reconstruct, vae),
        num_truth=reader_clips,
        num_checked=max(1, reader_clips // 3),
    )
    drawn = [make_game(seed + number, num_turns=turns, split=split) for number in range(games)]
    return Setting(seed, make_truth(drawn, **size), reader, embedder, vae)


def _encoder_config(bundle: Bundle) -> ShotEncoderConfig:
    if bundle.config.encoder is None:
        raise UserError(f"{bundle.path}: expected a model with the network encoder")
    return bundle.config.encoder


def _tokenizer(bundle: Bundle) -> Tokenizer:
    num_queries = _encoder_config(bundle).num_tokens
    return Tokenizer.load(bundle.tokenizer_dir, num_queries=num_queries)


def represent(
    bundle: Bundle, setting: Setting, *, frame: Literal["first", "random"] = "first"
) -> np.ndarray | None:
    """The true representations [g, t, n, r] of the games' shots; None: there is no T5 or CLIP.

    Args:
        bundle: the model.
        setting: the games.
        frame: of each true clip, that its representation shows.
    """
    if not (bundle.has("t5") and bundle.has("clip")):
        return None
    truth, shown = setting.truth, None
    if frame == "random":
        draws = np.random.default_rng(setting.first_seed)
        shown = draws.integers(truth.clips.shape[2], size=truth.levels.shape)
    return true_representations(
        truth,
        encoder=cast(ShotEncoder, bundle.load("encoder")),
        t5=cast(T5Encoder, bundle.load("t5")),
        clip=cast(CLIP, bundle.load("clip")),
        tokenizer=_tokenizer(bundle),
        shown=shown,
    )


def score_model(
    bundle: Bundle,
    setting: Setting,
    *,
    window: int | None = None,
    steps: int | None = None,
    batch_size: int = 10,
) -> tuple[Scores, PlayedGames]:
    """Plays a setting's games and judges them.

    Args:
        bundle: the model.
        setting: the games.
        window: turns of context; the model's own if None.
        steps: denoising steps a turn; the model's own if None.
        batch_size: games that are played side by side.
    """
    player = Player.from_bundle(bundle, window=window, steps=steps)
    with show_progress() as progress:
        played = play_games(
            player,
            setting.truth.games,
            seeds=setting.seeds,
            batch_size=batch_size,
            on_turn=functools.partial(progress, "turns"),
        )
    scores = score(
        setting.truth,
        played,
        reader=setting.reader,
        embedder=setting.embedder,
        vae=setting.vae,
        representations=represent(bundle, setting),
        num_text_tokens=_encoder_config(bundle).num_text_tokens,
    )
    return scores, played


def format_scores(scores: Scores) -> str:
    """The report as text: every score with its interval, then the tables by group."""
    return "\n".join(_lines(scores))


def _lines(scores: Scores) -> Iterator[str]:
    doubted = {name for name, check in scores.chosen.items() if not check.may_judge}
    yield f"{scores.num_games} games of {scores.num_turns} turns; 95 % intervals over games"
    for heading, table, rates in (
        ("all turns", scores.all_turns, scores.base_rates),
        ("open turns (context)", scores.open_turns, scores.open_base_rates),
    ):
        others = {**scores.ceilings, **rates} if table is scores.all_turns else rates
        yield ""
        yield (
            f"{heading:<22}{'score':>8}{'interval':>18}{'turns':>7}"
            + "".join(f"{name:>17}" for name in others)
            + f"{'paper':>8}"
        )
        for name, found in table.items():
            mark = "?" if doubted and name.split()[-1] in {*doubted, "three"} else ""
            cells = (f"{t[name].mean:>17.3f}" if name in t else " " * 17 for t in others.values())
            shown = name in PAPER and table is scores.all_turns
            paper = f"{PAPER[name]:>8.3f}" if shown else ""
            interval = f"{found.low:.3f} to {found.high:.3f}"
            yield (
                f"{name + mark:<22}{found.mean:>8.3f}{interval:>18}{found.count:>7}"
                + "".join(cells)
                + paper
            ).rstrip()
    for heading, tables in (
        ("turn", scores.by_turn),
        ("motion", scores.by_motion),
        ("level", scores.by_level),
    ):
        yield ""
        yield from _group_lines(heading, tables)
    if scores.representation:
        yield ""
        yield "shot representation, predicted against E_a of the truth"
        for part, found in scores.representation.items():
            yield f"  {part:<8}" + "  ".join(f"{name} {x:.3f}" for name, x in found.items())
    yield ""
    yield "readers on true clips (and through the VAE); * judges"
    for check in scores.checks:
        chosen = "*" if scores.chosen[check.attribute] == check else " "
        through = "" if check.reconstructed is None else f"  ({check.reconstructed:.3f})"
        yield f"{chosen} {check.attribute:<10} {check.reader:<24}{check.accuracy:.3f}{through}"
    yield f"{scores.seconds_a_turn:.2f} s a turn"


def _group_lines(heading: str, tables: dict[str, Table]) -> Iterator[str]:
    shown = ("ACC-S", "ACC-L", "ACC-F", "MAE-F", "character", "place", "time", "CLIP-I")
    names = [name for name in shown if all(name in table for table in tables.values())]
    yield f"{heading:<10}" + "".join(f"{name:>11}" for name in names) + f"{'turns':>8}"
    for kind, table in tables.items():
        cells = "".join(f"{table[name].mean:>11.3f}" for name in names)
        yield f"{kind:<10}{cells}{table['ACC-S'].count:>8}"


def storyboard(truth: Truth, played: PlayedGames, *, game: int = 0) -> bytes:
    """One game as a PNG: for each turn its instruction, the model's frames, the truth beneath."""
    zoom, gap, text_height, count = 3, 6, 44, 6
    _, num_turns, _, height, width, _ = truth.clips.shape
    row = text_height + 2 * (height * zoom + gap) + 2 * gap
    left = 70
    board = Image.new("RGB", (left + count * (width * zoom + gap), num_turns * row), "white")
    draw = ImageDraw.Draw(board)
    font, small = ImageFont.load_default(size=20), ImageFont.load_default(size=14)
    for number, turn in enumerate(truth.games[game]):
        top = number * row
        told = _states(played.states[game, number])
        true = _states([turn.scene.level, turn.social, turn.entertainment, turn.stamina])
        draw.text((left, top + 4), f"{number + 1}. {turn.instruction}", fill="black", font=font)
        draw.text((left, top + 27), f"model: {told}     truth: {true}", fill="grey", font=small)
        for line, (name, clips) in enumerate((("model", played.frames), ("truth", truth.clips))):
            y = top + text_height + line * (height * zoom + gap)
            draw.text((8, y + height * zoom // 2), name, fill="grey", font=small)
            for column, frame in enumerate(pick_frames(clips[game, number], count=count)):
                size = width * zoom, height * zoom
                picture = Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS)
                board.paste(picture, (left + column * (width * zoom + gap), y))
    buffer = io.BytesIO()
    board.save(buffer, format="PNG")
    return buffer.getvalue()


def _states(states: list[int] | np.ndarray) -> str:
    level, social, entertainment, stamina = (int(value) for value in states)
    return f"level {level}, social {social}, entertainment {entertainment}, stamina {stamina:+d}"


def main(
    model: str = "toy",
    /,
    *,
    split: Split = "test",
    games: int = 100,
    turns: int = 5,
    window: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    batch_size: int = 10,
    reader_clips: int = 960,
    out: Path = Path("scores.json"),
) -> None:
    """Score a model on the toy world.

    Args:
        model: A model folder, or `toy` for the embedded one.
        split: Held-out games: new ones, new combinations, or new phrasings.
        games: How many.
        turns: Of each game.
        window: Turns of context, this one included. Default: the model's own.
        steps: Denoising steps a turn. Default: the model's own.
        seed: Number of the first game; a game's number is also its seed in play.
        batch_size: Games played side by side.
        reader_clips: True clips that the readers learn from; a third as many others check them.
        out: The report, JSON; the storyboard goes beside it with the ending .png.
    """
    numbers = {"--games": games, "--turns": turns, "--batch-size": batch_size}
    least = dict.fromkeys(numbers, 1) | {"--reader-clips": _LEAST_READER_CLIPS}
    for name, number in (numbers | {"--reader-clips": reader_clips}).items():
        if number < least[name]:
            raise UserError(f"{name}: expected {least[name]} or more, found {number}")
    began = time.perf_counter()
    bundle = Bundle.open(model_folder(model))
    steps = bundle.protocol.denoising_steps if steps is None else steps
    setting = set_up(
        bundle, split=split, games=games, turns=turns, seed=seed, reader_clips=reader_clips
    )
    scores, played = score_model(bundle, setting, window=window, steps=steps, batch_size=batch_size)
    settings = {"model": model, "split": split, "games": games, "turns": turns, "window": window}
    settings |= {"steps": steps, "first_seed": seed, "reader_clips": reader_clips}
    settings |= {"model_digest": bundle.digest(), "date": time.strftime("%Y-%m-%d")}
    document = {"settings": settings, **to_json(scores)}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())
    board = out.with_suffix(".png")
    write_whole(board, storyboard(setting.truth, played))
    print(format_scores(scores))
    print(f"{out}, {board}: written after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    import tyro

    keep_compiled_programs()
    try:
        tyro.cli(main)
    except UserError as error:
        print(f"score_toy: {error}", file=sys.stderr)
        raise SystemExit(2) from None
