"""The shot encoder E_a: a shot's first frame and motion text as one representation.

`s_a = Concat(LN(MLP(text)), LN(MLP(image)))` (PAPER section 3.2): 30 text tokens and 196 image
tokens become 226 tokens of the decoder's width.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from animegamer_jax.configs import ShotEncoderConfig
from animegamer_jax.models.linear import Projection
from animegamer_jax.models.norms import LayerNorm


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
        image = self.image_norm(self.image(image))
        return jnp.concatenate([text, image], axis=1)

    def unconditional(self) -> Float[Array, "s d"]:
        """Returns the representation of zero features, guidance's unconditional context."""
        c = self.config
        text = jnp.zeros((1, c.num_text_tokens, c.text_size), c.dtype)
        image = jnp.zeros((1, c.num_image_tokens, c.image_size), c.dtype)
        return self(text, image)[0]
