"""Diffusion: the zero-terminal-SNR schedule, the guidance schedule, the sampler and the loss.

Pure functions. The sampler's table is computed on the host in float64, because the guidance
schedule is the cosine of a fifth power of a large number; on the device everything is float32.
Sources: CogVideoX (arXiv 2408.06072) for schedule and sampler, DPM-Solver++(2M) in its SDE form
(arXiv 2211.01095), zero terminal SNR (arXiv 2305.08891), v-prediction (arXiv 2202.00512).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from animegamer_jax.protocol import Protocol

Column = Any  # [n] on the host, a scalar inside the scan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Noise levels: scaled-linear betas, SNR shift, zero terminal SNR; and the guidance of a step.

    Attributes:
        shift: alpha_bar becomes alpha_bar / (shift + (1 - shift) * alpha_bar).
        guidance_scale, guidance_power, guidance_period: s, p and n of the guidance
            `1 + s (1 - cos(pi ((n - t) / n)^p)) / 2` at training step t. As in the released code,
            t is in 0..999 and n = 50, so the scale jumps about in [1, 1 + s].
        guidance_schedule: "cosine", as above, or "constant": 1 + s at every step.
        motion_guidance: m of the guidance 1 + m from a clip of motion value `still_motion` towards
            the turn's, in the noisier half of the training steps; 0: none.
        still_motion: The lowest motion value.
        student_timesteps: Training steps of a distilled decoder, falling from 999, at which it
            takes its own deterministic steps; empty: any number of steps of the sampler.
    """

    num_train_steps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    shift: float = 3.0
    guidance_scale: float = 6.0
    guidance_power: float = 5.0
    guidance_period: int = 50
    guidance_schedule: Literal["cosine", "constant"] = "cosine"
    motion_guidance: float = 0.0
    still_motion: float = 0.0
    student_timesteps: tuple[int, ...] = ()

    def signal_levels(self, steps: np.ndarray | None = None) -> np.ndarray:
        """Returns sqrt(alpha_bar) at the given training steps (ascending; all if None), float64.

        The last of the given steps gets exactly 0, and the first keeps its level: as in the
        release, the rescaling depends on the given steps.
        """
        betas = np.linspace(self.beta_start**0.5, self.beta_end**0.5, self.num_train_steps) ** 2
        alpha_bar = np.cumprod(1 - betas)
        alpha_bar = alpha_bar / (self.shift + (1 - self.shift) * alpha_bar)
        level = np.sqrt(alpha_bar if steps is None else alpha_bar[steps])
        return (level - level[-1]) * level[0] / (level[0] - level[-1])

    def sampling_steps(self, num_steps: int) -> np.ndarray:
        """Returns the training steps of a sampler, ascending: 19, 39, ..., 999 for 50 steps.

        Raises:
            ValueError: `num_steps` is not in 1..num_train_steps.
        """
        if not 1 <= num_steps <= self.num_train_steps:
            raise ValueError(
                f"{num_steps} denoising steps: expected a number in 1..{self.num_train_steps}"
            )
        spaced = np.linspace(self.num_train_steps - 1, 0, num_steps, endpoint=False)
        return spaced.astype(int)[::-1].copy()

    def is_noisy(self, timesteps: Any) -> Any:
        """Returns whether training steps are of the noisier half, where motion is guided."""
        return 2 * timesteps >= self.num_train_steps

    def guidance(self, timesteps: np.ndarray) -> np.ndarray:
        """Returns the guidance scale at the given training steps, float64."""
        if self.guidance_schedule == "constant":
            return np.full(np.shape(timesteps), 1.0 + self.guidance_scale)
        t = np.asarray(timesteps, np.float64)
        phase = ((self.guidance_period - t) / self.guidance_period) ** self.guidance_power
        return 1 + self.guidance_scale * (1 - np.cos(np.pi * phase)) / 2


def schedule_of(protocol: Protocol) -> Schedule:
    """Returns the schedule of a model with this protocol."""
    return Schedule(
        guidance_scale=protocol.guidance_scale,
        guidance_schedule=protocol.guidance_schedule,
        motion_guidance=protocol.motion_guidance,
        still_motion=protocol.motion_values[0] if protocol.motion_guidance else 0.0,
        student_timesteps=protocol.student_timesteps,
    )


class SamplerTable(NamedTuple):
    """One row a denoising step, in the order of sampling; all [n], float32 except the integers.

    A step is: d = signal x - noise_level v; x' = on_x x + on_denoised d + on_previous d_before +
    on_noise eps. `signal` and `noise_level` are on the training grid (the network snaps to it), the
    four coefficients on the sampler's own, coarser grid.

    `rows` is there only if steps are skipped: 2 for a step that evaluates both rows of guidance, 1
    for the conditional one alone, 0 for none, with what the network's layers added before.
    `motion_guidance` and `still_motion` are there only where a clip's motion is guided.
    """

    step: Column  # 0, 1, ...
    timestep: Column  # training step, 0..999
    guidance: Column
    signal: Column
    noise_level: Column
    on_x: Column
    on_denoised: Column
    on_previous: Column
    on_noise: Column
    rows: Column | None = None
    motion_guidance: Column | None = None
    still_motion: Column | None = None

    def part(self, start: int, stop: int) -> "SamplerTable":
        """Returns consecutive rows."""
        return jax.tree.map(lambda column: column[start:stop], self)

    def plain(self) -> "SamplerTable":
        """Returns the table without skipped steps and without guidance of motion."""
        return self._replace(rows=None, motion_guidance=None, still_motion=None)

    def parts(self) -> "tuple[SamplerTable, ...]":
        """Returns the rows with guidance of motion and those after them, which have none.

        On the host. A table that skips steps stays whole: it says itself which rows to evaluate.
        """
        if self.motion_guidance is None or self.rows is not None:
            return (self,)
        count = int((self.motion_guidance != 1).sum())
        parts = self.part(0, count), self.plain().part(count, len(self.step))
        return tuple(part for part in parts if len(part.step))

    def steps(self) -> "tuple[SamplerTable, ...]":
        """Returns the rows of all parts, one by one."""
        return tuple(part.part(n, n + 1) for part in self.parts() for n in range(len(part.step)))


def make_sampler_table(schedule: Schedule, num_steps: int) -> SamplerTable:
    """Computes the coefficients of DPM-Solver++(2M) SDE (arXiv 2211.01095, algorithm 2 as SDE).

    With lambda = log(s / sqrt(1 - s^2)) of the signal levels s now and s' next, h = lambda' -
    lambda and r = h_before / h. The first step starts at s = 0, where h is infinite: the limits
    are used. The last step ends at the denoised clip.

    A distilled decoder has a table of its own, `_student_table`.

    Raises:
        ValueError: No decoder, or not this distilled one, samples with this number of steps.
    """
    if schedule.student_timesteps:
        return _student_table(schedule, num_steps)
    steps = schedule.sampling_steps(num_steps)
    level = np.append(schedule.signal_levels(steps)[::-1] if num_steps > 1 else [0.0], 1.0)
    timestep = steps[::-1]
    with np.errstate(divide="ignore"):
        lam = np.log(level[:-1]) - 0.5 * np.log1p(-(level[:-1] ** 2))
    on_x, on_denoised = np.zeros(num_steps), np.ones(num_steps)
    on_previous, on_noise = np.zeros(num_steps), np.zeros(num_steps)
    for i in range(num_steps - 1):
        now, after = level[i], level[i + 1]
        h = lam[i + 1] - lam[i]
        on_x[i] = np.sqrt((1 - after**2) / (1 - now**2)) * np.exp(-h)
        gain = -np.expm1(-2 * h) * after
        # 1 / (2 r): zero if the previous step began at zero signal, where r is infinite.
        correction = h / (2 * (lam[i] - lam[i - 1])) if i > 1 else 0.0
        on_denoised[i], on_previous[i] = gain * (1 + correction), -gain * correction
        on_noise[i] = np.sqrt((1 - after**2) * -np.expm1(-2 * h))
    grid = schedule.signal_levels()
    snapped = grid[np.abs(grid[None] - level[:-1, None]).argmin(1)]
    columns = (
        timestep,
        schedule.guidance(timestep),
        snapped,
        np.sqrt(1 - snapped**2),
        on_x,
        on_denoised,
        on_previous,
        on_noise,
    )
    table = SamplerTable(np.arange(num_steps, dtype=np.int32), *map(np.float32, columns))
    if not schedule.motion_guidance:
        return table
    return table._replace(
        motion_guidance=np.where(
            schedule.is_noisy(timestep), 1 + schedule.motion_guidance, 1
        ).astype(np.float32),
        still_motion=np.full(num_steps, schedule.still_motion, np.float32),
    )


def _student_table(schedule: Schedule, num_steps: int) -> SamplerTable:
    """Computes the steps of a distilled decoder (TDM, arXiv 2503.06674), from noise to clip.

    With the denoised clip d and the noise e = (x - s d) / n that leads to it, x' = s' d + n' e.
    """
    timestep = np.array(schedule.student_timesteps)
    if num_steps != len(timestep):
        raise ValueError(
            f"{num_steps} denoising steps: this decoder was distilled to {len(timestep)}, and "
            "samples with no other number: leave the number out"
        )
    signal = schedule.signal_levels()[timestep]
    noise_level = np.sqrt(1 - signal**2)
    after = np.append(signal[1:], 1.0)
    on_x = np.sqrt(1 - after**2) / noise_level
    zeros = np.zeros(num_steps)
    columns = (
        timestep,
        np.ones(num_steps),
        signal,
        noise_level,
        on_x,
        after - on_x * signal,
        zeros,
        zeros,
    )
    return SamplerTable(np.arange(num_steps, dtype=np.int32), *map(np.float32, columns))


class KnownFrame(NamedTuple):
    """A frame of a clip that is known before the clip is made.

    The network's frames may be mixtures over time of the clip's (`models.latents.to_decoder`): the
    known one is the sum of the network's with `weights`, and has `shares` in them.
    """

    latents: Float[Array, "b h w c"]
    weights: Float[Array, " f"]
    shares: Float[Array, " f"]

    def put(self, x: Float[Array, "b f h w c"]) -> Float[Array, "b f h w c"]:
        """Returns latents with the known frame, free of noise, in place of theirs; float32."""
        x = x.astype(jnp.float32)
        missing = self.latents - jnp.einsum("f,bfhwc->bhwc", self.weights, x)
        return x + jnp.einsum("f,bhwc->bfhwc", self.shares, missing)


class SamplerState(NamedTuple):
    """The state between two steps.

    `bad_step` is the first step with a non-finite latent, or -1. `residual` is what the network's
    layers added when they were last evaluated, for all rows of guidance; None if no step is
    skipped. `known` is a frame that the network is shown at every step; None: it makes all.
    """

    x: Float[Array, "b f h w c"]
    denoised: Float[Array, "b f h w c"]
    bad_step: Int[Array, " b"]
    residual: Float[Array, "r t d"] | None = None
    known: KnownFrame | None = None


def start_sampler(x: Float[Array, "b f h w c"]) -> SamplerState:
    """Returns the state before the first step, from Gaussian noise `x`."""
    x = x.astype(jnp.float32)
    return SamplerState(x, jnp.zeros_like(x), jnp.full((x.shape[0],), -1, jnp.int32))


def sample(
    predict_v: Callable[..., Any],
    state: SamplerState,
    table: SamplerTable,
    *,
    noise: Callable[[jax.Array], jax.Array],
    each: tuple[Any, ...] = (),
) -> SamplerState:
    """Runs the rows of `table` as one `lax.scan`; consecutive rows run a part of the sampler.

    Args:
        predict_v: `(x, timestep [], guidance [], *own) -> v`, guidance already applied; `own` is
            the step's row of `each`. If the table skips steps, `(x, timestep, guidance, rows [],
            residual, *own) -> (v, residual)` (`guide_and_skip`).
        state: `start_sampler(...)`, or the result of the previous rows.
        table: All rows of `make_sampler_table`, or consecutive ones.
        noise: Returns a Gaussian array of the shape of `x` for a (traced) step number.
        each: Arrays computed for all steps beforehand, with a leading axis of steps.
    """

    def step(state: SamplerState, xs: tuple[SamplerTable, Any]) -> tuple[SamplerState, None]:
        row, own = xs
        seen = state.x if state.known is None else state.known.put(state.x)
        if row.rows is None:
            residual = None
            v = predict_v(seen, row.timestep, row.guidance, *own)
        else:
            given = row.timestep, row.guidance, row.rows, state.residual
            v, residual = predict_v(seen, *given, *own)
        v = v.astype(jnp.float32)
        denoised = row.signal * seen - row.noise_level * v
        if state.known is not None:
            denoised = state.known.put(denoised)
        x = row.on_x * state.x + row.on_denoised * denoised
        x = x + row.on_previous * state.denoised + row.on_noise * noise(row.step)
        finite = jnp.isfinite(x).all(axis=tuple(range(1, x.ndim)))
        first_bad = (state.bad_step < 0) & ~finite
        bad_step = jnp.where(first_bad, row.step, state.bad_step)
        return SamplerState(x, denoised, bad_step, residual, state.known), None

    return jax.lax.scan(step, state, (jax.tree.map(jnp.asarray, table), each))[0]


def hold(
    predict_v: Callable[..., jax.Array], known: KnownFrame | None, schedule: Schedule
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Shows a network a known frame, and takes that frame for what it answers there.

    Args:
        predict_v: `(x, timestep [b]) -> v`.
        known: The known frame; None: there is none.
        schedule: Schedule of the training steps.
    """
    if known is None:
        return predict_v

    def held(x: jax.Array, timestep: jax.Array) -> jax.Array:
        signal, noise_level = levels_at(schedule, jnp.round(timestep).astype(jnp.int32))
        seen = known.put(x)
        v = predict_v(seen, timestep).astype(jnp.float32)
        denoised = known.put(signal * seen - noise_level * v)
        return (signal * x - denoised) / noise_level

    return held


def guide(
    predict_v: Callable[..., jax.Array],
    context: Float[Array, "b n d"],
    unconditional: Float[Array, "*b n d"] | None,
) -> Callable[..., jax.Array]:
    """Adds classifier-free guidance: unconditional and conditional rows in one batch of 2 b.

    Args:
        predict_v: `(x [2b ...], timestep [2b], context [2b n d], *own) -> v [2b ...]`; b rows
            without guidance. `own` is passed through (see `sample`).
        context: Shot representations of the games.
        unconditional: E_a of zeros, the same for every game, or a context for each game. None: no
            guidance, whatever its scale.
    """
    if unconditional is None:

        def plain(x: jax.Array, timestep: jax.Array, guidance: jax.Array, *own: Any) -> jax.Array:
            del guidance
            return predict_v(x, jnp.broadcast_to(timestep, x.shape[:1]), context, *own)

        return plain

    base = jnp.broadcast_to(unconditional.astype(context.dtype), context.shape)
    rows = jnp.concatenate([base, context])

    def guided(x: jax.Array, timestep: jax.Array, guidance: jax.Array, *own: Any) -> jax.Array:
        twice = jnp.concatenate([x, x])
        v = predict_v(twice, jnp.broadcast_to(timestep, twice.shape[:1]), rows, *own)
        return _extrapolate(v, guidance)

    return guided


def _extrapolate(v: Float[Array, "r ..."], guidance: jax.Array) -> Float[Array, "b ..."]:
    """Returns the guided rows of unconditional and conditional ones, float32."""
    without, with_context = jnp.split(v.astype(jnp.float32), 2)
    return without + guidance * (with_context - without)


def guide_and_skip(
    evaluate: Callable[..., tuple[jax.Array, jax.Array]],
    reuse: Callable[..., jax.Array],
    context: Float[Array, "b n d"],
    unconditional: Float[Array, "*b n d"] | None,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Makes the `predict_v` of a table that skips steps.

    Args:
        evaluate: `(x [r ...], timestep [r], context [r n d], *own) -> (v, residual [r t d])`,
            for any number of rows r.
        reuse: `(x, timestep, context, residual, *own) -> v`, without the network's layers.
        context: Shot representations of the games.
        unconditional: As in `guide`; None: no guidance, and one row a game.
    """
    count, rows = len(context), context
    if unconditional is not None:
        base = jnp.broadcast_to(unconditional.astype(context.dtype), context.shape)
        rows = jnp.concatenate([base, context])

    def predict(
        x: jax.Array,
        timestep: jax.Array,
        guidance: jax.Array,
        evaluated: jax.Array,
        residual: jax.Array,
        *own: Any,
    ) -> tuple[jax.Array, jax.Array]:
        every = jnp.concatenate([x] * (len(rows) // count))
        times = jnp.broadcast_to(timestep, every.shape[:1])

        def guided(v: jax.Array) -> jax.Array:
            if unconditional is None:
                return v.astype(jnp.float32)
            return _extrapolate(v, guidance)

        def none() -> tuple[jax.Array, jax.Array]:
            return guided(reuse(every, times, rows, residual, *own)), residual

        def conditional() -> tuple[jax.Array, jax.Array]:
            v, added = evaluate(x, times[:count], context, *own)
            return v.astype(jnp.float32), jnp.concatenate([residual[:-count], added])

        def both() -> tuple[jax.Array, jax.Array]:
            v, added = evaluate(every, times, rows, *own)
            return guided(v), added

        branches = [none, conditional] if unconditional is None else [none, conditional, both]
        return jax.lax.switch(evaluated, branches)

    return predict


def levels_at(
    schedule: Schedule, timestep: Int[Array, " b"]
) -> tuple[Float[Array, "b 1 1 1 1"], Float[Array, "b 1 1 1 1"]]:
    """Returns signal and noise levels of training steps, shaped to multiply latents."""
    levels = schedule.signal_levels()
    shape = (-1, 1, 1, 1, 1)
    signal = jnp.asarray(levels, jnp.float32)[timestep].reshape(shape)
    noise_level = jnp.asarray(np.sqrt(1 - levels**2), jnp.float32)[timestep].reshape(shape)
    return signal, noise_level


def add_noise(
    schedule: Schedule,
    clean: Float[Array, "b f h w c"],
    noise: Float[Array, "b f h w c"],
    timestep: Int[Array, " b"],
) -> tuple[Float[Array, "b f h w c"], Float[Array, "b f h w c"]]:
    """Returns the noised latents at training steps 0..999, and the v that a network should predict.

    x_t = s x + sqrt(1 - s^2) eps and v = s eps - sqrt(1 - s^2) x (arXiv 2202.00512, appendix D).
    """
    signal, noise_level = levels_at(schedule, timestep)
    return signal * clean + noise_level * noise, signal * noise - noise_level * clean


def v_of_clean(
    schedule: Schedule,
    x: Float[Array, "b f h w c"],
    clean: Float[Array, "b f h w c"],
    timestep: Float[Array, " b"],
    *,
    std: float = 0.0,
) -> Float[Array, "b f h w c"]:
    """Converts a guess of the clean latents to v; float32.

    The guess g is the mean of a Gaussian prior of standard deviation `std`; the clean latents are
    the posterior mean, x = (s std^2 x_t + n^2 g) / (s^2 std^2 + n^2) with n = sqrt(1 - s^2): the
    guess itself if `std` is 0, and mostly the noised latents where the noise is smaller than `std`.
    Then v = (s x_t - x) / n, from the two equations of `add_noise`.
    """
    signal, noise_level = levels_at(schedule, jnp.round(timestep).astype(jnp.int32))
    x, clean = x.astype(jnp.float32), clean.astype(jnp.float32)
    spread = signal**2 * std**2 + noise_level**2
    return noise_level * (signal * (1 - std**2) * x - clean) / spread


def v_loss(v: Float[Array, "b f h w c"], target: Float[Array, "b f h w c"]) -> Float[Array, " b"]:
    """Returns the mean squared error on v of each sample (the released objective)."""
    difference = v.astype(jnp.float32) - target.astype(jnp.float32)
    return jnp.square(difference).mean(axis=(1, 2, 3, 4))
