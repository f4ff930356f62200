"""Black bars: removed scene by scene, and a picture without bars keeps its edges."""

import itertools

import numpy as np
from cut_films import cut
from tiny_films import moving, write_frames

from animegamer_jax.data.films.cutting.analysis import analyze_film
from animegamer_jax.media.video import decode_mp4


def test_bars_are_removed(tmp_path, folder):
    frames = [np.pad(f[:, :72], ((10, 8), (0, 0), (0, 0))) for f in moving(72, height=48, speed=1)]
    report = cut(write_frames(tmp_path / "film.mp4", frames), folder)
    assert report.bars[2:] == (0, 0)
    assert 10 <= report.bars[0] <= 12
    assert 8 <= report.bars[1] <= 10
    assert (report.height, report.width) == (66, 72)
    shown = decode_mp4(folder.read_clip(report.film, 0))
    assert shown.mean(axis=(0, 2, 3)).min() > 20


def test_bars_are_removed_by_scene(tmp_path, folder):
    """Scenes with bars, without, at the sides, and a night whose dark ends are no bars."""

    def pad(frames: list[np.ndarray], rows: int, columns: int) -> list[np.ndarray]:
        inner = [frame[: 64 - 2 * rows, : 96 - 2 * columns] for frame in frames]
        return [np.pad(f, ((rows, rows), (columns, columns), (0, 0))) for f in inner]

    whole = [moving(72, height=64, width=96, seed=seed) for seed in range(9)]
    night = (np.minimum(np.arange(64), np.arange(63, -1, -1)).clip(0, 24) / 24)[:, None, None]
    scenes = [
        *(pad(whole[0], 8, 0), whole[1], pad(whole[2], 8, 0), pad(whole[3], 0, 12)),
        *([(frame * night).astype(np.uint8) for frame in whole[4]], pad(whole[5], 8, 0)),
    ]
    report = cut(write_frames(tmp_path / "film.mp4", itertools.chain(*scenes)), folder)
    assert (report.scenes, report.bars, report.other_bars) == (6, (0, 0, 0, 0), 4)
    rows = folder.rows(report.film)
    assert [row.dropped for row in rows] == [None] * 6
    analysis = analyze_film(tmp_path / "film.mp4", folder.settings, name="film")
    for bars, rows_removed, columns_removed in zip(
        analysis.scene_bars, (8, 0, 8, 0, 0, 8), (0, 0, 0, 12, 0, 0), strict=True
    ):
        assert all(0 <= found - rows_removed <= 1 + bool(rows_removed) for found in bars[:2])
        assert all(0 <= found - columns_removed <= 1 + bool(columns_removed) for found in bars[2:])
    for row in rows:
        shown = decode_mp4(folder.read_clip(report.film, row.clip)).mean(axis=(0, 3))
        if row.scene != 4:
            assert min(shown.mean(axis=1).min(), shown.mean(axis=0).min()) > 20


def test_a_full_picture_in_a_film_with_bars_keeps_its_edges(tmp_path, folder):
    whole = [moving(72, height=64, width=96, seed=seed) for seed in range(6)]
    barred = [[np.pad(f[:48], ((8, 8), (0, 0), (0, 0))) for f in scene] for scene in whole[:5]]
    path = write_frames(tmp_path / "film.mp4", itertools.chain(*barred, whole[5]))
    report = cut(path, folder)
    assert 8 <= report.bars[0] <= 10
    analysis = analyze_film(path, folder.settings, name="film")
    assert analysis.scene_bars[-1] == (0, 0, 0, 0)
    assert report.other_bars == 1
