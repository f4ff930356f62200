"""Tiny datasets of random turns that several tests share: 9 frames of 16 x 24."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from animegamer_jax.configs import (
    CLIPConfig,
    DiTConfig,
    ModelConfig,
    ShotEncoderConfig,
    T5Config,
    VAEConfig,
)
from animegamer_jax.data.datasets import (
    DatasetInfo,
    FeatureInfo,
    Part,
    Record,
)
from animegamer_jax.data.shards import write_dataset
from animegamer_jax.media.video import encode_lossless_mp4
from animegamer_jax.protocol import PAPER
from animegamer_jax.tokenizer import Tokenizer, write_word_tokenizer

NUM_FRAMES, HEIGHT, WIDTH = 9, 16, 24
NUM_GAMES = 6  # of `conftest`'s features
TEXT, IMAGE, MOMENTS = (3, 12), (4, 20), (3, 4, 6, 8)
WORDS = ("mika", "ren", "waves", "runs", "gently", "day", *(f"w{i}" for i in range(40)))
PROTOCOL = dataclasses.replace(PAPER, caption_length=8)

CONFIG = ModelConfig(
    vae=VAEConfig(
        channels=8, multipliers=(1, 1, 2), num_res_blocks=1, latent_channels=4, norm_groups=4
    ),
    clip=CLIPConfig(
        image_size=16,
        patch_size=8,
        vision_width=20,
        vision_layers=2,
        vision_heads=2,
        text_width=8,
        text_layers=1,
        text_heads=2,
        vocab_size=152,
        context_length=8,
        embed_size=8,
    ),
    t5=T5Config(vocab_size=152, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=2),
)
FULL = dataclasses.replace(
    CONFIG,
    encoder=ShotEncoderConfig(
        num_text_tokens=3, num_image_tokens=4, text_size=12, image_size=20, representation_size=32
    ),
    dit=DiTConfig(latent_channels=4, latent_frames=3, latent_height=4, latent_width=6),
)
INFO = DatasetInfo(
    kind="games",
    made_by="a test",
    seed=0,
    num_frames=NUM_FRAMES,
    height=HEIGHT,
    width=WIDTH,
    fps=8,
    protocol=PROTOCOL,
    motion_edges=(1.0, 2.0, 3.0, 4.0),
    splits={},
)
FEATURES_INFO = dataclasses.replace(
    INFO,
    kind="features",
    features=FeatureInfo(
        bundle="a test",
        games="a test",
        frame="first",
        text=TEXT,
        image=IMAGE,
        moments=MOMENTS,
        t5=CONFIG.t5,
        clip=CONFIG.clip,
        vae=CONFIG.vae,
    ),
)


def make_tokenizer(folder: Path) -> Tokenizer:
    size = write_word_tokenizer(folder, WORDS)
    return Tokenizer.load(folder, vocab_size=size, num_queries=7)


def turns_of(num_games: int, *, first: int = 0, num_turns: int = 5) -> Iterator[Record]:
    """Turns that tell who they are: the instruction names game and turn, as do the numbers."""
    for game in range(first, first + num_games):
        for turn in range(num_turns):
            yield {
                "film": "tiny",
                "game": game,
                "turn": turn,
                "num_turns": num_turns,
                "instruction": f"w{game % 40} " + "gently " * turn,
                "is_open": int(turn > 0),
                "motion_text": "waves gently",
                "captions": [f"mika waves w{game % 40}", "mika", "day"],
                "character": "Mika",
                "motion": "wave",
                "place": "beach",
                "time": "day",
                "motion_level": 1 + turn % 5,
                "motion_value": game + turn / 8,
                "social": turn % 2,
                "entertainment": game % 2,
                "stamina": 1 if turn % 3 else -1,
            }


def frames_of(turn: Record) -> np.ndarray:
    """The clip of a turn: noise, and nobody else's."""
    rng = np.random.default_rng((turn["game"], turn["turn"], 1))
    return rng.integers(0, 256, (NUM_FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)


def features_of(turn: Record) -> dict[str, np.ndarray]:
    """The features of a turn: noise, and nobody else's."""
    rng = np.random.default_rng((turn["game"], turn["turn"], 2))
    shapes = {"text_features": TEXT, "image_features": IMAGE, "moments": MOMENTS}
    return {name: rng.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}


def features_record(turn: Record) -> dict[Part, Record]:
    """A turn with its features, as a feature dataset stores it."""
    features = features_of(turn)
    place = {name: turn[name] for name in ("game", "turn", "num_turns")}
    latents = {**place, "moments": features.pop("moments")}
    return {"conditions": {**turn, **features}, "latents": latents}


def write_games(path: Path, games: Mapping[str, int], *, info: DatasetInfo = INFO) -> Path:
    """A game dataset with that number of games in each split, numbered across splits."""
    first = dict(zip(games, np.cumsum([0, *games.values()]).tolist(), strict=False))

    def records(split: str) -> Iterator[dict[Part, Record]]:
        for turn in turns_of(games[split], first=first[split]):
            yield {"games": {**turn, "clip": encode_lossless_mp4(frames_of(turn))}}

    write_dataset(path, info, splits={s: lambda s=s: records(s) for s in games})
    return path


def write_features_set(
    path: Path, num_games: int, *, first: int = 0, splits: Sequence[str] = ("train",)
) -> Path:
    """A features set; its splits are alike."""

    def turns() -> Iterator[dict[Part, Record]]:
        yield from map(features_record, turns_of(num_games, first=first))

    write_dataset(path, FEATURES_INFO, splits=dict.fromkeys(splits, turns))
    return path
