"""Films cut to small clips."""

from pathlib import Path

import numpy as np
from etils import epath

from animegamer_jax.data.films.clips.store import (
    FilmReport,
    FilmSettings,
    ShotsFolder,
    SkippedFilm,
    film_content,
    film_id,
)
from animegamer_jax.data.films.cutting.process_film import process_film

SETTINGS = FilmSettings(height=48, width=72)
CLIP = 17


def process(path: Path, folder: ShotsFolder, **options) -> FilmReport | SkippedFilm:
    return process_film(epath.Path(path), folder, **options)


def cut(path: Path, folder: ShotsFolder, **options) -> FilmReport:
    report = process(path, folder, **options)
    assert isinstance(report, FilmReport), report
    return report


def id_of(path: Path) -> str:
    return film_id(epath.Path(path), content=film_content(epath.Path(path)))


def even_flow(frames: np.ndarray) -> np.ndarray:
    """Flow without an estimator: one pixel everywhere."""
    return np.ones((len(frames) - 1, 8, 12, 2), np.float32)
