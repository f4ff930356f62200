"""Motion of drawn clips is the motion that was asked for.

The table of measured values (rows motions, columns levels), for tuning what `poses` draws:

    python tests/media/test_motion.py --clips 8
"""

import argparse

import cv2
import numpy as np
import pytest

from animegamer_jax.media.motion import (
    PAPER_EDGES,
    dis_flow,
    film_flow,
    motion_level,
    motion_value,
)
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.scene import (
    CHARACTERS,
    LEVELS,
    MOTION_EDGES,
    MOTION_VALUES,
    MOTIONS,
    PLACES,
    TIMES,
    Scene,
)

CLIPS = 1


def draw_scene(rng: np.random.Generator, *, motion: str, level: int) -> Scene:
    """Half of them with what is left to chance, half without."""
    actor, partner = (str(name) for name in rng.choice(CHARACTERS, 2, replace=False))
    return Scene(
        character=actor,
        motion=motion,
        place=str(rng.choice(PLACES)),
        time=str(rng.choice(TIMES)),
        level=level,
        partner=partner if motion == "talk" else None,
        seed=int(rng.integers(2**31)) if rng.random() < 0.5 else None,
    )


def worn(frames: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Frames as a lossy autoencoder may return them: a little blurred, a little noisy."""
    soft = np.stack([cv2.GaussianBlur(frame, (0, 0), 0.6) for frame in frames])
    return np.rint(soft + rng.normal(0, 2, soft.shape)).clip(0, 255).astype(np.uint8)


def measure(*, num_clips: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Motion values of clean and of worn clips: [motions, levels, clips] each."""
    rng = np.random.default_rng(seed)
    values = np.zeros((2, len(MOTIONS), len(LEVELS), num_clips))
    for row, motion in enumerate(MOTIONS):
        for column, level in enumerate(LEVELS):
            for clip in range(num_clips):
                frames = render(draw_scene(rng, motion=motion, level=level))
                values[0, row, column, clip] = motion_value(frames)
                if clip < max(1, num_clips // 3):
                    values[1, row, column, clip] = motion_value(worn(frames, rng))
    return values[0], values[1, :, :, : max(1, num_clips // 3)]


def hits(values: np.ndarray) -> np.ndarray:
    """Whether each measured level is the level of its column."""
    levels = np.vectorize(lambda value: motion_level(float(value), edges=MOTION_EDGES))(values)
    return levels == np.array(LEVELS)[None, :, None]


@pytest.fixture(scope="module")
def measured() -> tuple[np.ndarray, np.ndarray]:
    return measure(num_clips=CLIPS)


def test_drawn_clips_have_their_level(measured):
    right = hits(measured[0])
    assert right.mean(axis=(0, 2)).min() >= 0.87, "at most one of a level's eight clips errs"
    assert right.mean() >= 0.97


def test_drawn_clips_move_as_fast_as_the_decoder_is_asked(measured):
    means = measured[0].mean(axis=(0, 2))
    np.testing.assert_allclose(means, MOTION_VALUES, rtol=0.1)


def test_noise_and_blur_are_not_taken_for_motion(measured):
    right = hits(measured[1])
    assert right.mean() >= 0.9


def test_a_shift_is_measured_in_pixels_at_full_size():
    rng = np.random.default_rng(0)
    texture = cv2.GaussianBlur(rng.uniform(0, 255, (480, 900)), (0, 0), 6)
    texture = ((texture - texture.min()) / np.ptp(texture) * 255).astype(np.uint8)
    for speed in (4, 20):
        frames = np.stack([texture[:, 10 + k * speed :][:, :720] for k in range(3)])
        frames = np.repeat(frames[..., None], 3, axis=-1)
        assert abs(motion_value(frames) / speed - 1) < 0.08
        small = np.stack([cv2.resize(f, (72, 48), interpolation=cv2.INTER_AREA) for f in frames])
        assert abs(motion_value(small) / speed - 1) < 0.15


def test_stillness_is_zero_and_only_what_moves_counts():
    frames = np.full((4, 48, 72, 3), 90, np.uint8)
    assert motion_value(frames) == 0.0
    rng = np.random.default_rng(0)
    noisy = np.clip(frames + rng.normal(0, 2, frames.shape), 0, 255).astype(np.uint8)
    assert motion_value(noisy) < MOTION_VALUES[0]
    square = rng.integers(0, 255, (14, 14, 3), np.uint8)
    for step, frame in enumerate(frames):
        frame[20:34, 20 + step : 34 + step] = square
    assert 6 < motion_value(frames) < 11


def painted(height: int, width: int, *, seed: int) -> np.ndarray:
    """A picture with coarse and fine brush strokes."""
    rng = np.random.default_rng(seed)
    layers = [
        cv2.resize(rng.uniform(0, 255, (n, n, 3)), (width, height), interpolation=cv2.INTER_CUBIC)
        for n in (6, 24, 80)
    ]
    return np.mean(layers, axis=0).clip(0, 255).astype(np.uint8)


def walking(speed: float, *, width: int) -> np.ndarray:
    """A figure that slides over a still ground, in frames of 240 rows; speed at 480."""
    ground, figure = painted(240, 360, seed=0), painted(150, width, seed=1)
    frames = []
    for step in range(6):
        frame, place = ground.copy(), round(20 + step * speed / 2)
        frame[80:230, place : place + width] = figure
        frames.append(frame)
    return np.stack(frames)


@pytest.mark.parametrize(("speed", "width"), [(4, 90), (20, 90), (44, 40)])
def test_what_stands_still_around_a_figure_does_not_count(speed, width):
    frames = walking(speed, width=width)
    found = motion_value(frames, estimate=film_flow) / speed
    assert 0.8 < found < 1.08
    assert motion_value(frames, estimate=dis_flow) / speed < found - 0.05, "what it is for"


@pytest.mark.parametrize("speed", [2, 6, 40])
def test_a_camera_that_moves_has_its_speed(speed):
    wide = painted(480, 720 + 6 * speed, seed=2)
    frames = np.stack([wide[:, k * speed : k * speed + 720] for k in range(6)])
    assert motion_value(frames, estimate=film_flow) / speed == pytest.approx(1, abs=0.1)


def test_where_nothing_is_explained_all_of_the_flow_counts():
    rng = np.random.default_rng(0)
    frames = np.stack([rng.integers(0, 255, (48, 72, 3), np.uint8) for _ in range(3)])
    assert motion_value(frames, estimate=film_flow) > 0
    assert motion_value(np.full((3, 48, 72, 3), 9, np.uint8), estimate=film_flow) == 0


def test_another_estimator_takes_its_place():
    def estimate(frames: np.ndarray) -> np.ndarray:
        flow = np.zeros((len(frames) - 1, 48, 72, 2), np.float32)
        flow[:, :24, :, 0] = 0.6
        flow[:, 24:, :, 0] = 0.01
        return flow

    frames = np.zeros((3, 48, 72, 3), np.uint8)
    assert motion_value(frames, estimate=estimate) == pytest.approx(6.0)


def test_levels_lie_between_their_edges():
    assert [motion_level(value) for value in (0.0, 0.75, 3.4, 12.5, 30.0)] == [1, 2, 2, 4, 5]
    assert [motion_level(value, edges=MOTION_EDGES) for value in MOTION_VALUES] == list(LEVELS)
    assert len(PAPER_EDGES) == len(MOTION_EDGES) == 4


def print_table(*, num_clips: int) -> None:
    for title, values in zip(("clean", "worn"), measure(num_clips=num_clips), strict=True):
        right = hits(values)
        print(f"{title}: share of the level's own clips, mean value [least, most]")
        for motion, row, ok in zip(MOTIONS, values, right, strict=True):
            cells = (
                f"{o.mean():.2f} {v.mean():5.1f} [{v.min():4.1f} {v.max():4.1f}]"
                for v, o in zip(row, ok, strict=True)
            )
            print(f"{motion:6}", "  ".join(cells))
        print("all   ", right.mean(axis=(0, 2)).round(3), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--clips", type=int, default=8)
    print_table(num_clips=parser.parse_args().clips)
