import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from animegamer_jax.configs import VAEConfig
from animegamer_jax.models.latents import (
    cosines,
    frame_to_decoder,
    from_decoder,
    know_first,
    mode,
    sample,
    split_moments,
    to_decoder,
)


def test_mode_and_sample():
    mean = np.full((4, 1000, 2), 0.5, np.float32)
    log_variance = np.broadcast_to(np.log(np.array([0.01, 4.0], np.float32)), mean.shape)
    moments = jnp.asarray(np.concatenate([mean, log_variance], -1))
    np.testing.assert_array_equal(mode(moments), mean)
    drawn = np.asarray(sample(moments, key=jax.random.key(0)))
    np.testing.assert_allclose(drawn.std((0, 1)), [0.1, 2.0], rtol=0.05)
    np.testing.assert_allclose(drawn.mean((0, 1)), [0.5, 0.5], atol=0.1)
    _, clipped = split_moments(jnp.array([0.0, 0.0, -1e3, 1e3]))
    np.testing.assert_array_equal(clipped, [-30.0, 20.0])


def test_latents_as_the_decoder_sees_them():
    """Each frequency over time times its scale, and back; without scales only the factor."""
    latents = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 5, 2)).astype(np.float32))
    config = VAEConfig(scaling_factor=0.5, frequency_scales=(0.5, 1.0, 4.0))
    seen = to_decoder(latents, config)
    assert seen.shape == latents.shape
    np.testing.assert_allclose(from_decoder(seen, config), latents, atol=1e-5)
    before, after = (np.einsum("kf,bfhwz->kbhwz", cosines(3), x) for x in (latents, seen))
    for frequency, scale in enumerate(config.frequency_scales):
        np.testing.assert_allclose(after[frequency], 0.5 * scale * before[frequency], atol=1e-5)
    still = np.array(np.broadcast_to(np.asarray(latents)[:, :1], latents.shape))
    seen = to_decoder(jnp.asarray(still), config)
    np.testing.assert_allclose(seen, 0.5 * 0.5 * still, atol=1e-5)
    picture = to_decoder(jnp.asarray(still[:, :1]), config)  # as a frame of the still clip
    np.testing.assert_array_equal(frame_to_decoder(jnp.asarray(still[:, 0]), config), picture[:, 0])
    np.testing.assert_allclose(picture, 0.5 * 0.5 * still[:, :1], atol=1e-5)
    np.testing.assert_allclose(from_decoder(picture, config), still[:, :1], atol=1e-5)
    np.testing.assert_allclose(cosines(17) @ cosines(17).T, np.eye(17), atol=1e-12)
    plain = dataclasses.replace(config, frequency_scales=())
    np.testing.assert_array_equal(to_decoder(latents, plain), np.asarray(latents) * 0.5)
    np.testing.assert_array_equal(from_decoder(latents, plain), np.asarray(latents) / 0.5)
    with pytest.raises(ValueError, match=r"latents of 4 frames: .* frequency scales for 3"):
        to_decoder(jnp.zeros((1, 4, 1, 1, 1)), config)


@pytest.mark.parametrize("scales", [(), (0.5, 1.0, 4.0)])
def test_a_known_first_frame(scales):
    """It takes the first frame's place and leaves the others, as the VAE sees them."""
    rng = np.random.default_rng(0)
    latents, first = (
        jnp.asarray(rng.normal(size=(2, frames, 4, 5, 2)).astype(np.float32)) for frames in (3, 1)
    )
    config = VAEConfig(scaling_factor=0.5, frequency_scales=scales)
    known = know_first(first, config, num_frames=3)
    found = from_decoder(known.put(to_decoder(latents, config)), config)
    np.testing.assert_allclose(found[:, :1], first, atol=1e-5)
    np.testing.assert_allclose(found[:, 1:], latents[:, 1:], atol=1e-5)
