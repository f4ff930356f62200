"""The losses that distill a diffusion network to a few steps; networks are functions to them.

Notation: s and n are signal and noise level of a training step, x = s d + n e is a noised clip d
with the noise e, and a network answers v (`diffusion.add_noise`), so d = s x - n v and e = n x + s
v, both defined at s = 0. The *student* takes the steps tau_K = 999 > ... > tau_1 from noise to clip
(`diffusion.make_sampler_table`). The *teacher* is the network that it learns from, and the *fake*
one learns the distribution of the student's clips, whose score the student needs.

Trajectory distribution matching, "tdm" (arXiv 2503.06674): a step i of the student's own path ends
at y, at the level m of tau_{i-1}. It is noised further, to a step t inside the segment:

    y_t = (s_t / s_m) y + sqrt(n_t^2 - (s_t n_m / s_m)^2) z

and compared there. With the student's clip g, and the clips that fake network, teacher and guided
teacher see in y_t, f and c and c' = c + (w - 1)(c - u), the target of g is g + c' - f, its loss

    mean((sqrt((g - target)^2 + h^2) - h) / mean|g - c'|),   h = 1e-3

and the fake network's min(s_t^2 / n_t^2, 5) omega mean((f - g)^2), where omega weighs a sample by
the density of the noise that leads from g to y_t, over that of z.

Distribution matching, "dmd" (DMD2 without its discriminator, arXiv 2405.14867): t is anywhere, y_t
is g noised to it, the target of g is g + (c' - f) / mean|g - c'|, its loss 0.5 mean((g -
target)^2), and omega is one. The fake network sees a mixture of the clips of all steps.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from animegamer_jax.diffusion import Schedule, levels_at

Method = Literal["tdm", "dmd"]
Latents = Float[Array, "b f h w c"]
PredictV = Callable[[Latents, Float[Array, " b"]], Latents]
"""Maps noised latents and training steps to v; its context is closed over."""

_LEAST_STEP = 20  # nearer to the clip, the networks see the clip itself
_MARGIN = 10  # steps between the drawn ones and a segment's upper end
_MOST_SNR = 5.0
_HUBER = 1e-3


class Path(NamedTuple):
    """The student's steps from noise to clip, and the training steps drawn in each; all [k]."""

    timestep: Any
    signal: Any
    noise_level: Any
    next_signal: Any
    next_noise_level: Any
    lowest: Any
    highest: Any


def student_path(schedule: Schedule) -> Path:
    """Returns the path of a schedule's student.

    Raises:
        ValueError: Its steps do not fall from the last training step, or lie too close together.
    """
    steps = np.array(schedule.student_timesteps)
    lowest = np.maximum(np.append(steps[1:], 0), _LEAST_STEP)
    highest = steps - _MARGIN
    last = schedule.num_train_steps - 1
    if not len(steps) or steps[0] != last or (highest <= lowest).any():
        raise ValueError(
            f"student steps {', '.join(map(str, steps)) or 'none'}: expected training steps that "
            f"fall from {last} to {_LEAST_STEP + _MARGIN + 1} or more, each more than {_MARGIN} "
            "below the one before"
        )
    signal = np.append(schedule.signal_levels()[steps], 1.0)
    noise_level = np.sqrt(1 - signal**2)
    columns = steps, signal[:-1], noise_level[:-1], signal[1:], noise_level[1:]
    return Path(*map(np.float32, columns), lowest=lowest, highest=highest)


def take_step(x: Latents, v: Latents, step: Path) -> tuple[Latents, Latents]:
    """Returns the clip that a student sees in noised latents, and where its step ends.

    Args:
        x: Noised latents at the step's start.
        v: The network's answer.
        step: The step of all latents, or of each.
    """
    signal, noise_level, next_signal, next_noise_level = map(
        _as_factor, (step.signal, step.noise_level, step.next_signal, step.next_noise_level)
    )
    clean = signal * x - noise_level * v
    return clean, next_signal * clean + next_noise_level * (noise_level * x + signal * v)


def walk(predict_v: PredictV, noise: Latents, path: Path) -> Float[Array, "k b f h w c"]:
    """Returns the noised latents before each step of a student's path, the first of them noise."""

    def follow(x: Latents, step: Path) -> tuple[Latents, Latents]:
        v = predict_v(x, jnp.full(len(x), step.timestep)).astype(jnp.float32)
        after = take_step(x, v, step)[1]
        return after, after

    steps = jax.tree.map(lambda column: jnp.asarray(column[:-1]), path)
    _, after = jax.lax.scan(follow, noise, steps)
    return jnp.concatenate([noise[None], after])


class Losses(NamedTuple):
    """Losses of each sample; each has a gradient for its own network only."""

    student: Float[Array, " b"]
    fake: Float[Array, " b"]


def distillation_losses(
    *,
    student: PredictV,
    fake: PredictV,
    teacher: PredictV,
    unconditional: PredictV | None,
    noise: Latents,
    schedule: Schedule,
    key: Key[Array, ""],
    guidance: float = 1.0,
    method: Method = "tdm",
) -> Losses:
    """Computes the losses of student and fake network, at one drawn step of each sample.

    Args:
        student: Network that learns.
        fake: Network that follows the student's distribution.
        teacher: Network that the student learns from.
        unconditional: The teacher without condition; None: its guidance is one.
        noise: Gaussian noise that the student starts from.
        schedule: Schedule with the student's steps.
        key: Key of the drawn steps and their noise.
        guidance: Guidance scale w of the teacher.
        method: Method of the module's description.
    """
    path = student_path(schedule)
    step_key, time_key, noise_key = jax.random.split(key, 3)
    rows = jnp.arange(len(noise))
    number = jax.random.randint(step_key, rows.shape, 0, len(path.timestep))
    step = jax.tree.map(lambda column: jnp.asarray(column)[number], path)
    x = jax.lax.stop_gradient(walk(student, noise, path))[number, rows]
    made, end = take_step(x, student(x, step.timestep).astype(jnp.float32), step)
    lowest, highest = step.lowest, step.highest
    if method == "dmd":
        lowest = jnp.full_like(lowest, _LEAST_STEP)
        highest = jnp.full_like(highest, schedule.num_train_steps - 1 - _MARGIN)
    t = jax.random.randint(time_key, rows.shape, lowest, highest + 1)
    z = jax.random.normal(noise_key, noise.shape)
    s, n = levels_at(schedule, t)
    if method == "dmd":
        noised = s * made + n * z
    else:
        share = s / _as_factor(step.next_signal)
        rest = jnp.maximum(n**2 - (share * _as_factor(step.next_noise_level)) ** 2, 0)
        noised = share * end + jnp.sqrt(rest) * z
    noised, fixed = jax.lax.stop_gradient((noised, made))
    at = t.astype(jnp.float32)

    def seen_by(predict_v: PredictV) -> Latents:
        return s * noised - n * predict_v(noised, at).astype(jnp.float32)

    guided = seen_by(teacher)
    if unconditional is not None:
        guided = guided + (guidance - 1) * (guided - seen_by(unconditional))
    guided = jax.lax.stop_gradient(guided)
    followed = seen_by(fake)
    distance = _mean(jnp.abs(fixed - guided))
    direction = guided - jax.lax.stop_gradient(followed)
    if method == "dmd":
        target = fixed + direction / _as_factor(distance + 1e-6)
        student_loss = 0.5 * _mean((made - target) ** 2)
        omega = jnp.ones_like(distance)
    else:
        huber = jnp.sqrt((made - fixed - direction) ** 2 + _HUBER**2) - _HUBER
        student_loss = _mean(huber) / jnp.maximum(distance, 1e-6)
        leading = (noised - s * fixed) / n
        omega = jnp.exp(0.5 * (_mean(z**2) - _mean(leading**2)))
    snr = jnp.minimum(((s / n) ** 2).reshape(-1), _MOST_SNR)
    return Losses(student_loss, snr * omega * _mean((followed - fixed) ** 2))


def _as_factor(x: Float[Array, "*b"]) -> Float[Array, "b2 1 1 1 1"]:
    return x.reshape(-1, 1, 1, 1, 1)


def _mean(x: Latents) -> Float[Array, " b"]:
    return x.mean(axis=(1, 2, 3, 4))
