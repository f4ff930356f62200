"""The shot encoder E_a: a shot's first frame and motion text as one representation.

`s_a = Concat(LN(MLP(text)), LN(MLP(image)))` (paper, section 3.2): 30 text tokens and 196 image
tokens become 226 tokens of the decoder's width.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8

from animegamer_jax.configs import ShotEncoderConfig
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.linear import Projection
from animegamer_jax.models.norms import LayerNorm
from animegamer_jax.sharding import network_rules


class ShotEncoder(nnx.Module):
    """Fuses T5 features of the motion text and CLIP features of the first frame.

    `output_norm` is not used: it is kept because the released files contain it and an export must
    write it back.
    """

    def __init__(self, config: ShotEncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        width = config.representation_size
        self.text = Projection(config.text_size, width, config=config, rngs=rngs)
        self.image = Projection(config.image_size, width, config=config, rngs=rngs)
        self.text_norm = LayerNorm(width, eps=1e-5, config=config, rngs=rngs)
        self.image_norm = LayerNorm(width, eps=1e-5, config=config, rngs=rngs)
        self.output_norm = LayerNorm(width, eps=1e-5, config=config, rngs=rngs)

    def __call__(
        self, text: Float[Array, "b n i"], image: Float[Array, "b m j"]
    ) -> Float[Array, "b s d"]:
        text = self.text_norm(self.text(text))
        return jnp.concatenate([text, self.image_tokens(image)], axis=1)

    def image_tokens(self, image: Float[Array, "b m j"]) -> Float[Array, "b m d"]:
        """Returns the image tokens, which come last in a representation."""
        return self.image_norm(self.image(image))

    def unconditional(self) -> Float[Array, "s d"]:
        """Returns the representation of zero features, guidance's unconditional context."""
        c = self.config
        text = jnp.zeros((1, c.num_text_tokens, c.text_size), c.dtype)
        image = jnp.zeros((1, c.num_image_tokens, c.image_size), c.dtype)
        return self(text, image)[0]


class ShotNetworks(NamedTuple):
    """The networks that represent a picture as a shot."""

    clip: CLIP
    encoder: ShotEncoder


def encode_frames(networks: ShotNetworks, frames: UInt8[Array, "b h w 3"]) -> Float[Array, "b m d"]:
    """Returns the image tokens of E_a for frames of any size, float32; a function to jit."""
    with network_rules("clip"):
        features = networks.clip.see(frames)
    with network_rules("encoder"):
        return networks.encoder.image_tokens(features).astype(jnp.float32)


def encode_shots(
    networks: ShotNetworks,
    frames: UInt8[Array, "b h w 3"],
    text: Float[Array, "b n i"] | None = None,
) -> Float[Array, "b s d"]:
    """Returns E_a of frames of any size and their texts, float32; a function to jit.

    Args:
        networks: CLIP and the shot encoder.
        frames: One picture a shot.
        text: T5's features of a text a shot, padding included, of `config.num_text_tokens` tokens;
            None: zeros, as guidance's unconditional context has.
    """
    c = networks.encoder.config
    if text is None:
        text = jnp.zeros((len(frames), c.num_text_tokens, c.text_size), c.dtype)
    with network_rules("clip"):
        features = networks.clip.see(frames)
    with network_rules("encoder"):
        return networks.encoder(text, features).astype(jnp.float32)
