"""The shot encoder E_a: what an animation shot looks like at first and what happens in it.

`s_a = Concat(LN(MLP(text)), LN(MLP(image)))` (PAPER section 3.2): 30 text tokens and 196 image
tokens become 226 tokens of the decoder's width.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from animegamer_jax.configs import ShotEncoderConfig
from animegamer_jax.models.linear import LayerNorm, Projection


class ShotEncoder(nnx.Module):
    """E_a: T5 features of the motion text and CLIP features of the first frame, fused.

    `output_norm` is in the released files and takes no part in any released computation; it is
    kept so that the files come back whole.
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
        """E_a of zero features: the context of the guidance's unconditional row."""
        c = self.config
        text = jnp.zeros((1, c.num_text_tokens, c.text_size), c.dtype)
        image = jnp.zeros((1, c.num_image_tokens, c.image_size), c.dtype)
        return self(text, image)[0]
