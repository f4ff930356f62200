"""Trains the classifier of the toy world's clips (`toy/scoring/classifier.py`) on drawn frames.

    python scripts/toy/classifier.py --out animegamer_jax/assets/reader.safetensors

Frames are mirrored, blurred, noised, shifted and recoloured at random. Prints the share of held-out
clips that are read correctly, by attribute. About two hours on two cores.
"""

import multiprocessing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Key
from run_script import run_script

from animegamer_jax.progress import print_status
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.scene import NUM_FRAMES, SIDES, Scene
from animegamer_jax.toy.scoring.attributes import VALUES, draw_scenes, labels
from animegamer_jax.toy.scoring.classifier import WEIGHTS, Classifier, read_clips, save_classifier

_FRAMES_OF_CLIP = 2
_CHECKED = 400
_SHIFT_DOWN, _SHIFT_ACROSS = 4, 24  # pixels, at most


def draw(scene: Scene) -> np.ndarray:
    """Draws a few frames of a scene's clip."""
    rng = np.random.default_rng(scene.seed)
    return render(scene)[np.sort(rng.choice(NUM_FRAMES, _FRAMES_OF_CLIP, replace=False))]


def roughen(frames: Float[Array, "b h w 3"], key: Key[Array, ""]) -> Float[Array, "b h w 3"]:
    """Blurs, shifts, recolours and noises frames in [0, 1]; a shift across wraps around."""
    b, h, w, _ = frames.shape
    keys = jax.random.split(key, 7)
    half = jax.image.resize(frames, (b, h // 2, w // 2, 3), "linear")
    third = jax.image.resize(frames, (b, h // 3, w // 3, 3), "linear")
    kinds = jnp.stack(
        [frames, *(jax.image.resize(x, frames.shape, "cubic") for x in (half, third))]
    )
    blurred = kinds[jax.random.randint(keys[0], (b,), 0, 3), jnp.arange(b)]
    share = jax.random.uniform(keys[1], (b, 1, 1, 1))
    x = share * frames + (1 - share) * blurred
    most = jnp.array([_SHIFT_DOWN, _SHIFT_ACROSS])
    shift = jax.random.randint(keys[2], (b, 2), -most, most + 1)
    x = jax.vmap(lambda one, by: jnp.roll(one, by, axis=(0, 1)))(x, shift)
    x = x * jax.random.uniform(keys[3], (b, 1, 1, 3), minval=0.9, maxval=1.1)
    x += jax.random.uniform(keys[4], (b, 1, 1, 3), minval=-0.05, maxval=0.05)
    level = jax.random.uniform(keys[5], (b, 1, 1, 1), maxval=0.06)
    return jnp.clip(x + level * jax.random.normal(keys[6], x.shape), 0, 1)


def main(
    *,
    out: Path = WEIGHTS,
    steps: int = 10_000,
    clips: int = 24_000,
    batch_size: int = 64,
    processes: int = 2,
) -> None:
    """Train the network that reads clips of the toy world.

    Args:
        out: File of the weights.
        steps: Number of optimizer steps.
        clips: Number of drawn clips to learn from.
        batch_size: Number of frames a step.
        processes: Number of drawing processes.
    """
    scenes = draw_scenes(clips, seed=0)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        frames = np.stack(pool.map(draw, scenes, chunksize=16))
        checked = draw_scenes(_CHECKED, seed=1)
        true_clips = np.stack(pool.map(render, checked, chunksize=8))
    print_status(f"drew {len(frames)} clips")
    truth = {name: np.repeat(labels(scenes, name), _FRAMES_OF_CLIP) for name in VALUES}
    frames = frames.reshape(-1, *frames.shape[2:])
    classifier = Classifier(rngs=nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0, 1e-3, steps // 20, steps)
    optimizer = nnx.Optimizer(classifier, optax.adamw(schedule, weight_decay=0.02), wrt=nnx.Param)

    @nnx.jit
    def step(classifier, optimizer, shown, truth, key):
        def loss(classifier: Classifier) -> Array:
            logits = classifier(roughen(shown.astype(jnp.float32) / 255, key))
            total = jnp.zeros(())
            for name, right in truth.items():
                each = optax.softmax_cross_entropy_with_integer_labels(
                    logits[name], jnp.maximum(right, 0)
                )
                total += (each * (right >= 0)).mean()
            return total

        value, gradients = nnx.value_and_grad(loss)(classifier)
        optimizer.update(classifier, gradients)
        return value

    rng = np.random.default_rng(0)
    for number in range(steps):
        rows = rng.choice(len(frames), batch_size, replace=False)
        some = {name: values[rows] for name, values in truth.items()}
        shown, mirrored = frames[rows], rng.random(batch_size) < 0.5
        shown = np.where(mirrored[:, None, None, None], shown[:, :, ::-1], shown)
        some["side"] = np.where(mirrored, len(SIDES) - 1 - some["side"], some["side"])
        value = step(
            classifier, optimizer, shown, jax.tree.map(jnp.asarray, some), jax.random.key(number)
        )
        if number % 100 == 99:
            print_status(f"step {number + 1}: loss {float(value):.3f}")
        if number % 500 == 499:
            save_classifier(classifier, out)
    save_classifier(classifier, out)
    found = read_clips(classifier, true_clips)
    for name in VALUES:
        right = labels(checked, name)
        known = right >= 0
        print(f"{name}: right in {(found[name] == right)[known].mean():.3f} of {known.sum()} clips")


if __name__ == "__main__":
    run_script(main, name="classifier.py")
