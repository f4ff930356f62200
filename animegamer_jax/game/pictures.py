"""A player's own picture as a turn: E_a of the picture and its text, and states of standing still.

The picture stands in the window as the turn before the first, so the model sees it as it sees any
past turn, and it slides out like any other. Its image tokens are E_a of CLIP's features, its text
tokens E_a of T5's features of the motion (paper, section 3.1), as training has them for true turns.
In a decoder's memory it stands as the VAE encodes it.
"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import ModelConfig, clip_size, feature_disagreements
from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.game.instructions import check_picture_text, motion_of
from animegamer_jax.game.saved.turns import NewPicture
from animegamer_jax.media.pictures import Picture, fit_picture
from animegamer_jax.models.encoder import ShotNetworks, encode_shots
from animegamer_jax.models.latents import frame_to_decoder, mode
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.models.vae import VAE, signed
from animegamer_jax.protocol import Protocol
from animegamer_jax.tokenizer import T5Tokenizer, Tokenizer


def still_states(protocol: Protocol) -> Int32[np.ndarray, "4"]:
    """Returns the states of a picture's turn: those of a character who stands still and rests.

    Each is the value of the protocol nearest to zero, the positive one of two: motion level 1, no
    social and entertainment, stamina 1. So all are values that the model was trained on.
    """
    nearest = [min(values, key=lambda v: (abs(v), -v)) for values in protocol.state_values]
    return np.array(nearest, np.int32)


def frame_size(config: ModelConfig) -> tuple[int, int]:
    """Returns rows and columns of a model's clips, to which pictures are fitted.

    Raises:
        UserError: The networks that make clips are missing.
    """
    if config.dit is None or config.vae is None:
        raise UserError("cannot play without dit and vae: convert these networks, too")
    return clip_size(config.dit, config.vae)[1:]


def check_window(window: int) -> None:
    """Raises UserError if a window has no place for a picture."""
    if window < 2:
        raise UserError(
            f"window {window}: it holds no past turn, so that a picture would change nothing: play "
            "with a window of 2 or more, or without a picture"
        )


def check_networks(config: ModelConfig, *, name: str) -> None:
    """Checks that a bundle can represent a picture.

    Raises:
        UserError: It lacks networks, or their sizes differ.
    """
    clip, t5, encoder = config.clip, config.t5, config.encoder
    if clip is None or t5 is None or encoder is None:
        networks = {"clip": clip, "t5": t5, "encoder": encoder}
        missing = " and ".join(n for n, network in networks.items() if network is None)
        raise UserError(
            f"{name}: a picture needs the networks clip, t5 and encoder, and this bundle lacks "
            f"{missing}: convert again with them (--clip, --t5), or play without a picture"
        )
    for size, (expected, found) in feature_disagreements(config).items():
        raise UserError(
            f"{name}: {size}: expected {expected}, as the encoder reads, found {found}: "
            "convert again with networks of one model"
        )


class PictureEncoder:
    """Represents pictures by a bundle's CLIP, T5 and E_a, which are loaded for the first picture.

    They compute in the bundle's own number format, as features for training do, on one device.

    Args:
        bundle: The bundle.
    """

    def __init__(self, bundle: Bundle):
        self._bundle = bundle
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises UserError if the bundle cannot represent a picture (`check_networks`)."""
        check_networks(self._bundle.config, name=str(self._bundle.path))

    def represent(self, picture: Picture, text: str, *, name: str = "picture") -> NewPicture:
        """Returns the turn of a picture with its text, which is that turn's instruction.

        Args:
            picture: The picture, of any size (`fit_picture`).
            text: Its text, such as "Character: Hana; Motion: standing; Background: day town."
            name: The picture's name in messages.

        Raises:
            UserError: The text is empty or too long, or the bundle cannot represent a picture.
            NonFiniteError: A network returned a number that is not finite.
        """
        self.check()
        config, protocol = self._bundle.config, self._bundle.protocol
        assert config.encoder is not None
        text = check_picture_text(text, name=name)
        height, width = frame_size(config)
        pixels = fit_picture(picture, height=height, width=width)
        with self._lock:  # players of a server come at the same time
            tokenizer, t5_tokenizer = self._tokenizers
            try:
                tokenizer.caption(text, protocol.caption_length)
            except UserError as error:
                raise UserError(f"{name}: its text: {error}") from error
            tokens = t5_tokenizer.padded(motion_of(text), config.encoder.num_text_tokens)
            found = _encode(*self._networks, jnp.asarray(tokens[None]), jnp.asarray(pixels[None]))
        representation = np.asarray(found[0])
        if not np.isfinite(representation).all():
            raise NonFiniteError(f"{name}: E_a of the picture is not finite")
        first_latents = None
        if config.first_dit is not None and config.first_dit.memory:
            with self._lock:
                first_latents = np.asarray(encode_frame(self._vae, jnp.asarray(pixels[None])))
            if not np.isfinite(first_latents).all():
                raise NonFiniteError(f"{name}: the VAE's latents of the picture are not finite")
        return NewPicture(text, representation, still_states(protocol), pixels, first_latents)

    @functools.cached_property
    def _tokenizers(self) -> tuple[Tokenizer, Tokenizer | T5Tokenizer]:
        own = Tokenizer.load(self._bundle.tokenizer_dir, num_queries=1)  # checked by the player
        return own, self._bundle.load_t5_tokenizer()

    @functools.cached_property
    def _vae(self) -> VAE:
        return self._bundle.load("vae")

    @functools.cached_property
    def _networks(self) -> tuple[T5Encoder, ShotNetworks]:
        load = self._bundle.load
        return load("t5"), ShotNetworks(load("clip"), load("encoder"))


@jax.jit
def encode_frame(vae: VAE, pixels: jax.Array) -> jax.Array:
    """Returns the first latents [h w c] of a picture [1 y x 3], by the VAE (float32)."""
    moments = vae.encode(signed(pixels[None]))
    return frame_to_decoder(mode(moments)[0, 0], vae.config).astype(jnp.float32)


@jax.jit
def _encode(
    t5: T5Encoder, networks: ShotNetworks, tokens: jax.Array, pixels: jax.Array
) -> jax.Array:
    return encode_shots(networks, pixels, t5(tokens))
