"""The VAE's latents: drawn from what its encoder returns, and in the units of the diffusion model.

For the latter, call `to_decoder` after `VAE.encode` and `from_decoder` before `VAE.decode`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from animegamer_jax.configs import VAEConfig
from animegamer_jax.diffusion import KnownFrame

_MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE = -30.0, 20.0


def split_moments(
    moments: Float[Array, "*b m"],
) -> tuple[Float[Array, "*b z"], Float[Array, "*b z"]]:
    """Returns means and log-variances, the latter clipped to [-30, 20] as in CogVideoX."""
    mean, log_variance = jnp.split(moments, 2, axis=-1)
    return mean, jnp.clip(log_variance, _MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE)


def mode(moments: Float[Array, "*b m"]) -> Float[Array, "*b z"]:
    """Returns the most likely latents, not scaled: the means."""
    return split_moments(moments)[0]


def sample(moments: Float[Array, "*b m"], *, key: Key[Array, ""]) -> Float[Array, "*b z"]:
    """Draws latents, not scaled, from the encoder's Gaussian."""
    mean, log_variance = split_moments(moments)
    noise = jax.random.normal(key, mean.shape, mean.dtype)
    return mean + jnp.exp(0.5 * log_variance) * noise


def cosines(num_frames: int) -> Float[np.ndarray, "k f"]:
    """Returns the orthonormal cosine transform (DCT-II) of frames: a row for each frequency."""
    k, f = np.arange(num_frames)[:, None], np.arange(num_frames)[None]
    basis = np.cos(np.pi * k * (f + 0.5) / num_frames) * np.sqrt(2 / num_frames)
    basis[0] /= np.sqrt(2)
    return basis


def to_decoder(
    latents: Float[Array, "*b f h w z"], config: VAEConfig
) -> Float[Array, "*b f h w z"]:
    """Converts the VAE's latents to the units of the diffusion model.

    Multiplies them by `scaling_factor` and, with `frequency_scales`, each of their cosine
    frequencies over time by its scale. A single frame is treated as one of a still clip.

    Raises:
        ValueError: The number of scales differs from the number of latent frames.
    """
    return _over_time(latents * config.scaling_factor, _frequency_gain(config, latents.shape[-4]))


def frame_to_decoder(
    latents: Float[Array, "*b h w z"], config: VAEConfig
) -> Float[Array, "*b h w z"]:
    """Converts the VAE's latents of single frames as `to_decoder`, without an axis of frames."""
    return to_decoder(latents[..., None, :, :, :], config)[..., 0, :, :, :]


def from_decoder(
    latents: Float[Array, "*b f h w z"], config: VAEConfig
) -> Float[Array, "*b f h w z"]:
    """Inverts `to_decoder`."""
    gain = _frequency_gain(config, latents.shape[-4])
    inverse = None if gain is None else np.linalg.inv(gain)
    return _over_time(latents, inverse) / config.scaling_factor


def know_first(
    latents: Float[Array, "b 1 h w z"], config: VAEConfig, *, num_frames: int
) -> KnownFrame:
    """Returns the first latent frame of clips, in the VAE's units, as one that is known."""
    gain = _frequency_gain(config, num_frames)
    gain = np.eye(num_frames) if gain is None else gain
    scaled = latents[:, 0].astype(jnp.float32) * config.scaling_factor
    weights, shares = np.linalg.inv(gain)[0], gain[:, 0]
    return KnownFrame(scaled, jnp.asarray(weights, "float32"), jnp.asarray(shares, "float32"))


def _frequency_gain(config: VAEConfig, frames: int) -> Float[np.ndarray, "f f"] | None:
    """Returns the matrix that scales frequencies over time; None if there are no scales."""
    scales = config.frequency_scales
    if not scales:
        return None
    if frames == 1:
        return np.array([[scales[0]]])
    if len(scales) != frames:
        raise ValueError(
            f"latents of {frames} frames: the VAE has frequency scales for {len(scales)}"
        )
    basis = cosines(frames)
    return basis.T @ (np.array(scales)[:, None] * basis)


def _over_time(x: jax.Array, matrix: Float[np.ndarray, "f f"] | None) -> jax.Array:
    if matrix is None:
        return x
    weights = jnp.asarray(matrix, jnp.float32)  # float32 island: frequencies of all magnitudes
    return jnp.einsum("kf,...fhwz->...khwz", weights, x.astype(jnp.float32)).astype(x.dtype)
