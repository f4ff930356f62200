"""The losses of distillation, with networks whose answers are known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from animegamer_jax import diffusion
from animegamer_jax.diffusion import Schedule, make_sampler_table
from animegamer_jax.train.stages.distillation import distillation_losses, student_path, walk

STEPS = (999, 856, 665, 399)
SCHEDULE = Schedule(guidance_scale=0.0, student_timesteps=STEPS)
SHAPE = (64, 1, 2, 2, 1)
MEAN, STD = 0.4, 0.5


def levels_of(timestep):
    s = jnp.asarray(SCHEDULE.signal_levels(), jnp.float32)[jnp.asarray(timestep).astype(int)]
    return s.reshape(-1, 1, 1, 1, 1), jnp.sqrt(1 - s**2).reshape(-1, 1, 1, 1, 1)


def gaussian(mean, std):
    """The network that knows that clips are Gaussian: v of the posterior's mean."""

    def predict_v(x, timestep):
        s, n = levels_of(timestep)
        return n * (s * (1 - std**2) * x - mean) / (s**2 * std**2 + n**2)

    return predict_v


teacher = gaussian(MEAN, STD)


def noise(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def test_the_path_is_the_schedules():
    path = student_path(SCHEDULE)
    np.testing.assert_array_equal(path.timestep, STEPS)
    np.testing.assert_allclose(path.signal, [0, 0.049, 0.162, 0.423], atol=1e-3)
    np.testing.assert_allclose(path.next_signal[:-1], path.signal[1:])
    assert (path.next_signal[-1], path.next_noise_level[-1]) == (1, 0)
    np.testing.assert_array_equal(path.lowest, [856, 665, 399, 20])
    np.testing.assert_array_equal(path.highest, [989, 846, 655, 389])
    np.testing.assert_allclose(path.signal**2 + path.noise_level**2, 1, atol=1e-6)


@pytest.mark.parametrize("steps", [(), (856, 399), (999, 999), (999, 995), (999, 25)])
def test_steps_that_are_no_path(steps):
    with pytest.raises(ValueError, match="expected training steps that fall from 999"):
        student_path(Schedule(student_timesteps=steps))


def test_play_walks_the_same_path():
    """The sampler of play, with the student's table, sees what the losses see, without noise."""
    table = make_sampler_table(SCHEDULE, 4)
    seen = []

    def predict_v(x, timestep, guidance):
        assert guidance.shape == ()
        return teacher(x, jnp.broadcast_to(timestep, len(x)))

    def step(state, row):
        seen.append(np.asarray(state.x))
        rows = jax.tree.map(lambda column: column[row : row + 1], table)
        return diffusion.sample(predict_v, state, rows, noise=lambda i: jnp.nan_to_num(i * 0.0))

    state = functools.reduce(step, range(4), diffusion.start_sampler(noise()))
    np.testing.assert_allclose(
        walk(teacher, noise(), student_path(SCHEDULE)), np.stack(seen), atol=1e-5
    )
    np.testing.assert_allclose(state.x, state.denoised, atol=1e-6)
    v = teacher(jnp.asarray(seen[-1]), jnp.full(len(seen[-1]), 399.0))
    levels = SCHEDULE.signal_levels()[399]
    clean = levels * seen[-1] - np.sqrt(1 - levels**2) * np.asarray(v)
    np.testing.assert_allclose(state.x, clean, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 5, 50])
def test_a_student_samples_with_its_own_steps_only(count):
    with pytest.raises(ValueError, match=f"{count} denoising steps: this decoder was distilled to"):
        make_sampler_table(SCHEDULE, count)


def losses(student=teacher, fake=teacher, **options):
    options = {"unconditional": None, "noise": noise(), "key": jax.random.key(1)} | options
    return distillation_losses(
        student=student, fake=fake, teacher=teacher, schedule=SCHEDULE, **options
    )


@pytest.mark.parametrize("method", ["tdm", "dmd"])
def test_each_loss_moves_its_own_network(method):
    def total(params, name):
        networks = {k: gaussian(*params[k]) for k in ("student", "fake")}
        return getattr(losses(**networks, method=method), name).mean()

    params = {"student": (0.1, 0.3), "fake": (0.2, 0.4)}
    for name in params:
        gradient = jax.jit(jax.grad(total), static_argnums=1)(params, name)
        for network, found in gradient.items():
            moved = [bool(np.abs(x) > 1e-6) for x in found]
            assert moved == [network == name] * 2


def test_nothing_to_learn_where_the_fake_network_is_the_teacher():
    np.testing.assert_allclose(jax.jit(losses)().student, 0, atol=1e-6)
    moved = jax.jit(jax.grad(lambda mean: losses(student=gaussian(mean, STD)).student.mean()))
    assert abs(float(moved(0.1))) < 1e-6
    other = jax.jit(lambda: losses(fake=gaussian(0.0, STD)).student.mean())
    assert float(other()) > 1e-3


def test_the_students_loss_in_numbers():
    """Recomputed in float64 where the drawn step and its noise do not matter: constant networks."""

    def constant(value):
        """Sees the clip `value` in everything."""

        def predict_v(x, timestep):
            s, n = levels_of(timestep)
            return (s * x - value) / n

        return predict_v

    g, f, c, u, w = 0.9, 0.5, 0.2, -0.1, 3.0
    networks = {
        "student": constant(g), "fake": constant(f), "teacher": constant(c),
        "unconditional": constant(u),
    }  # fmt: skip
    options = {"schedule": SCHEDULE, "key": jax.random.key(1), "guidance": w}
    found = jax.jit(lambda: distillation_losses(**networks, **options, noise=noise()))()
    guided = c + (w - 1) * (c - u)
    expected = (np.sqrt((guided - f) ** 2 + 1e-6) - 1e-3) / abs(g - guided)
    np.testing.assert_allclose(found.student, expected, rtol=1e-3)
    # The fake network's: min(SNR, 5) omega (f - g)^2, with omega about one, as many numbers go in.
    assert (np.asarray(found.fake) <= 5 * (f - g) ** 2 * 20).all()
    assert (np.asarray(found.fake) > 0).all()


@pytest.mark.parametrize(("method", "steps"), [("tdm", STEPS), ("dmd", STEPS[:1])])
def test_a_student_learns_its_teachers_distribution(method, steps):
    """Few steps of the teacher make clips that vary too little; those of its student do not.

    With "dmd" the fake network sees a mixture of the clips of all steps, so only one step is exact.
    """
    schedule = Schedule(student_timesteps=steps)
    path = student_path(schedule)

    def student(params):
        def predict_v(x, timestep):
            at = jnp.argmin(jnp.abs(jnp.asarray(steps)[None] - timestep[:, None]), axis=1)
            factor, shift = (p[at].reshape(-1, 1, 1, 1, 1) for p in params)
            s, n = levels_of(timestep)
            return (s * x - factor * x - shift) / n  # it sees the clip factor * x + shift

        return predict_v

    @jax.jit
    def clips(params):
        x = walk(student(params), noise(7, (4096, *SHAPE[1:])), path)[-1]
        v = student(params)(x, jnp.full(len(x), float(steps[-1])))
        s = SCHEDULE.signal_levels()[steps[-1]]
        return s * x - np.sqrt(1 - s**2) * v

    def loss(params, key):
        start, draw = jax.random.split(key)
        found = distillation_losses(
            student=student(params["student"]),
            fake=gaussian(*params["fake"]),
            teacher=teacher,
            unconditional=None,
            noise=jax.random.normal(start, (256, *SHAPE[1:])),
            schedule=schedule,
            key=draw,
            method=method,
        )
        return (found.student + found.fake).mean()

    s, n = (level.ravel() for level in levels_of(steps))
    spread = s**2 * STD**2 + n**2
    params = {
        "student": (s * STD**2 / spread, n**2 * (MEAN - 0.3) / spread),  # the teacher's, too low
        "fake": (jnp.float32(MEAN), jnp.float32(STD)),
    }
    labels = {"student": ("slow",) * 2, "fake": ("fast",) * 2}
    rates = {"slow": 3e-3, "fast": 1.5e-2}
    optimizer = optax.partition(
        {k: optax.adam(r, b1=0.0, b2=0.95) for k, r in rates.items()}, labels
    )

    @jax.jit
    def train(params):
        def step(carry, key):
            params, state = carry
            gradient = jax.grad(loss)(params, key)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(3), 1500)
        return jax.lax.scan(step, (params, optimizer.init(params)), keys)[0][0]

    before, after = (np.asarray(clips(p["student"])) for p in (params, train(params)))
    assert abs(float(before.mean()) - MEAN) > 0.2
    assert abs(float(after.mean()) - MEAN) < 0.05
    assert abs(float(after.std()) - STD) < 0.05
    assert abs(float(before.std()) - STD) > abs(float(after.std()) - STD)
