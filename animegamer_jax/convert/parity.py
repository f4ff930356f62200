"""Parity: every number that a reference folder recorded, against this code.

The folder is laid out like the released checkpoints, with recorded arrays in the same sub-folders:
`mllm/`, `vdm/`, `vae/`, `clip/`, `tokenizer/` (`docs/parity.md` lists the arrays). The checkpoints
are converted to a bundle, loaded from it in float32, and compared; this tests conversion as well.
"""

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.convert.options import ConvertOptions
from animegamer_jax.convert.released import convert_released
from animegamer_jax.errors import UserError, first_line
from animegamer_jax.models.mistral import Tokens
from animegamer_jax.models.mllm import MLLM, GameBatch
from animegamer_jax.protocol import RELEASED, Layout, Prompt
from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.paths import absolute
from animegamer_jax.storage.serialization import to_json
from animegamer_jax.storage.untrusted import open_arrays
from animegamer_jax.tokenizer import Tokenizer

# Largest error over the reference's RMS: tables; networks and losses; 50 calls of a network.
TABLE, NETWORK, SAMPLER = 1e-5, 1e-4, 1e-3

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison. For exact quantities, `tolerance` is 0 and the errors count differences."""

    quantity: str
    shape: tuple[int, ...]
    max_error: float
    relative_error: float
    tolerance: float

    @property
    def result(self) -> Literal["pass", "FAIL"]:
        return "pass" if self.relative_error <= self.tolerance else "FAIL"


def close(quantity: str, found: Any, expected: Any, tolerance: float) -> Row:
    """Returns a row for real numbers; a wrong shape or a NaN fails whatever the tolerance."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        return Row(f"{quantity} (shape {found.shape})", expected.shape, np.inf, np.inf, tolerance)
    error = float(np.abs(found - expected).max(initial=0.0))
    rms = float(np.sqrt(np.square(expected).mean())) if expected.size else 0.0
    relative = error / rms if rms else (0.0 if error == 0.0 else np.inf)
    if not np.isfinite(error):
        error = relative = np.inf
    return Row(quantity, expected.shape, error, relative, tolerance)


def exact(quantity: str, found: Any, expected: Any) -> Row:
    """Returns a row for ids and masks: the number of entries that differ."""
    found, expected = np.asarray(found), np.asarray(expected)
    same_shape = found.shape == expected.shape
    differ = float((found != expected).sum() if same_shape else max(found.size, expected.size))
    return Row(quantity, expected.shape, differ, differ, 0.0)


# The MLLM


def _prompt(
    layout: Layout, tokenizer: Tokenizer, instructions: list[str], num_history: int
) -> Prompt:
    """Returns the prompt of one game's turn; `instructions` end with this turn's."""
    size = layout.protocol.caption_length
    captions = np.zeros((1, layout.window, size), np.int32)
    lengths = np.zeros((1, layout.window), np.int32)
    for back, text in enumerate(reversed(instructions)):
        captions[0, -1 - back], lengths[0, -1 - back] = tokenizer.caption(text, size)
    return layout.assemble(
        jnp.asarray(captions),
        jnp.asarray(lengths),
        jnp.zeros((1, layout.window - 1, 4), jnp.int32),
        jnp.asarray([num_history], jnp.int32),
    )


def _answers(
    mllm: MLLM, prompt: Prompt, history: jax.Array, layout: Layout, *, num_greedy: int
) -> dict[str, jax.Array]:
    """Returns what the recorded arrays hold of one prompt, under both masks."""
    answers = {}
    for mask in ("bidirectional", "causal"):
        hidden, cache = mllm.prefill(
            prompt, history, layout, bidirectional=mask == "bidirectional", extra_slots=num_greedy
        )
        if mask == "bidirectional":
            at = layout.queries
            answers["masked_rep"] = mllm.output_resampler(hidden[:, at])[0]
            answers["released_rep"] = mllm.output_resampler(hidden[:, layout.representation])[0]
        logits = mllm.mistral.logits(hidden[:, -1])
        answers[f"{mask}_last_logits"] = logits[0]

        def step(carry: Any, _: None, /) -> tuple[Any, jax.Array]:
            logits, position, cache = carry
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            hidden, cache = mllm.extend(token[:, None], position[:, None] + 1, cache)
            return (mllm.mistral.logits(hidden[:, -1]), position + 1, cache), token[0]

        start = (logits, prompt.positions[:, -1], cache)
        _, answers[f"{mask}_greedy_ids"] = jax.lax.scan(step, start, length=num_greedy)
    return answers


def compare_rollout(mllm: MLLM, tokenizer: Tokenizer, arrays: Arrays) -> Iterator[Row]:
    """Compares every turn of every recorded window: ids, masks, logits, representations."""
    found = {re.fullmatch(r"w(\d{1,3})_instructions", name) for name in arrays} - {None}
    for window in sorted(int(match[1]) for match in found if match):
        instructions = [str(text) for text in arrays[f"w{window}_instructions"]]
        longest = max(len(tokenizer.encode(text)) for text in instructions)
        protocol = dataclasses.replace(
            RELEASED, window=window, caption_length=max(longest, RELEASED.caption_length)
        )
        n, size = mllm.config.num_queries, mllm.config.representation_size
        layout = Layout(protocol, tokenizer.ids, num_queries=n, window=window)
        greedy = re.compile(rf"w{window}_t\d+_\w+_greedy_ids")
        counts = [len(arrays[name]) for name in arrays if greedy.fullmatch(name)]
        num_greedy = max(counts, default=0)
        run = jax.jit(
            lambda mllm, prompt, history, layout=layout, num_greedy=num_greedy: _answers(
                mllm, prompt, history, layout, num_greedy=num_greedy
            )
        )
        for turn in range(len(instructions)):
            key, name = f"w{window}_t{turn}_", f"mllm: window {window}, turn {turn + 1}, "
            if not any(recorded.startswith(key) for recorded in arrays):
                continue
            past = range(max(0, turn - window + 1), turn)
            prompt = _prompt(layout, tokenizer, [instructions[t] for t in (*past, turn)], len(past))
            history = np.zeros((1, window - 1, n, size), np.float32)
            for back, t in enumerate(reversed(past)):
                history[0, -1 - back] = arrays[f"w{window}_t{t}_released_rep"]
            valid = np.asarray(prompt.valid[0])
            is_query = np.zeros(layout.length, bool)
            is_query[layout.queries] = True
            tokens = {
                "input_ids": np.asarray(prompt.ids[0])[valid],
                "attention_mask": np.where(is_query[valid], -1, 1),
                "query_mask": is_query[valid],
                "history_mask": layout.history[valid],
            }
            answers = run(mllm, prompt, jnp.asarray(history.reshape(1, -1, size)))
            for quantity, value in (tokens | answers).items():
                if key + quantity not in arrays:
                    continue
                title, expected = name + quantity.replace("_", " "), arrays[key + quantity]
                if quantity.endswith("greedy_ids"):
                    yield exact(title, value[: len(expected)], expected)
                elif quantity in tokens:
                    yield exact(title, value, expected)
                else:
                    yield close(title, value, expected, NETWORK)


def compare_mllm_losses(mllm: MLLM, arrays: Arrays) -> Iterator[Row]:
    """Compares cross-entropy, reconstruction and their sum on a padded batch of games."""
    mask = arrays["attention_mask"]
    rows = np.arange(len(mask))
    embeds = arrays["turn_embeds"]
    queries = np.stack([np.flatnonzero(row) for row in arrays["query_mask"]])
    batch = GameBatch(
        ids=jnp.asarray(arrays["input_ids"], jnp.int32),
        tokens=Tokens(
            positions=jnp.asarray(np.maximum(np.cumsum(mask != 0, axis=1) - 1, 0), jnp.int32),
            valid=jnp.asarray(mask != 0),
            blocks=jnp.asarray(mask == -1, jnp.int32),
        ),
        labels=jnp.asarray(arrays["labels"], jnp.int32),  # -100 is ignored, as in PyTorch
        history_mask=jnp.asarray(arrays["history_mask"]),
        history=jnp.asarray(embeds.reshape(len(embeds), -1, embeds.shape[-1])),
        query_slots=jnp.asarray(queries),
        target=jnp.asarray(embeds[rows, arrays["target_turn"]]),
    )
    language, representation = jax.jit(lambda mllm, batch: mllm.losses(batch))(mllm, batch)
    found = {
        "lm_loss": language,
        "rec_loss": representation,
        "total_loss": language + representation,
    }
    for name, value in found.items():
        if name in arrays:
            yield close(f"mllm: {name.replace('_', ' ')}", value, arrays[name], NETWORK)


# The decoder


@jax.jit
def _predict(dit: Any, *numbers: Any) -> jax.Array:
    x, timestep, motion, context = (jnp.asarray(value, jnp.float32) for value in numbers)
    return dit(x, timestep=timestep, motion=motion, context=context)


def compare_dit(dit: Any, encoder: Any, arrays: Arrays) -> Iterator[Row]:
    """Compares E_a's context, and the transformer with it and with the MLLM's representations."""
    context = np.asarray(encoder(jnp.asarray(arrays["text"]), jnp.asarray(arrays["clip"])))
    if "context" in arrays:
        yield close("encoder: context", context, arrays["context"], NETWORK)
        context = arrays["context"]
    contexts = {"out_encoder": context}
    if "out_mllm" in arrays:  # row 0 is the unconditional one
        contexts["out_mllm"] = context.copy()
        contexts["out_mllm"][1 : 1 + len(arrays["mllm"])] = arrays["mllm"]
    if "out_mllm_train" in arrays:
        contexts["out_mllm_train"] = arrays["mllm_train"][:, 0]
    x = np.moveaxis(arrays["x"], 2, -1)
    for name, rows in contexts.items():
        if name in arrays:
            v = _predict(dit, x, arrays["timestep"], arrays["flow"], rows)
            yield close(f"dit: {name}", v, np.moveaxis(arrays[name], 2, -1), NETWORK)


def compare_sampler(dit: Any, encoder: Any, arrays: Arrays) -> Iterator[Row]:
    """Compares the schedules, and the whole sampler with the recorded noise."""
    scale = np.asarray(arrays["cfg_scale"], np.float64)
    num_steps = len(scale)
    steps = diffusion.Schedule().sampling_steps(num_steps)[::-1]
    # The guidance's period is an option of its own in the release: 50, or the number of steps.
    schedule = min(
        (diffusion.Schedule(guidance_period=period) for period in (50, num_steps)),
        key=lambda schedule: np.abs(schedule.guidance(steps) - scale).max(),
    )
    table = diffusion.make_sampler_table(schedule, num_steps)
    name = f"sampler of {num_steps} steps: "
    if "alphas_cumprod_sqrt" in arrays:
        levels = np.append(schedule.signal_levels(steps[::-1])[::-1], 1.0)
        yield close(name + "signal levels", levels, arrays["alphas_cumprod_sqrt"], TABLE)
    if "sigma_idx" in arrays:
        yield close(name + "timesteps", table.timestep, arrays["sigma_idx"][:, 1], 0.0)
    yield close(name + "guidance", schedule.guidance(steps), scale, TABLE)

    # Recorded in call order: one draw in the first step, then two in each step, of which the second
    # is used, and none in the last.
    x0 = np.moveaxis(arrays["x0"], 2, -1)
    draws = np.moveaxis(arrays["noise_draws"], 3, -1)
    used = [*draws[:1], *draws[2 : 2 * (num_steps - 1) : 2], np.zeros_like(x0)]
    noise = jnp.asarray(np.stack(used), jnp.float32)
    motion = np.broadcast_to(np.asarray(arrays["flow"], np.float32), x0.shape[:1])

    @jax.jit
    def run(dit: Any, encoder: Any, x: jax.Array, context: jax.Array, noise: jax.Array):
        def predict_v(x: jax.Array, timestep: jax.Array, context: jax.Array) -> jax.Array:
            motions = jnp.concatenate([motion, motion])
            return dit(x, timestep=timestep, motion=motions, context=context)

        guided = diffusion.guide(predict_v, context, encoder.unconditional())
        start = diffusion.start_sampler(x)
        return diffusion.sample(guided, start, table, noise=lambda i: noise[i]).x

    out = run(dit, encoder, jnp.asarray(x0), jnp.asarray(arrays["mllm"]), noise)
    yield close(name + "latents", out, np.moveaxis(arrays["out"], 2, -1), SAMPLER)


def compare_diffusion_losses(dit: Any, encoder: Any, arrays: Arrays) -> Iterator[Row]:
    """Compares the noise levels of training, and the loss with either context."""
    schedule = diffusion.Schedule()
    if "sigmas" in arrays:
        yield close("loss: signal levels", schedule.signal_levels(), arrays["sigmas"], TABLE)
    clean, noise = (jnp.asarray(np.moveaxis(arrays[name], 2, -1)) for name in ("clean", "noise"))
    noised, target = diffusion.add_noise(
        schedule, clean, noise, jnp.asarray(arrays["idx"], jnp.int32)
    )
    contexts = {}
    if "loss_encoder" in arrays:
        text, clip = jnp.asarray(arrays["text"]), jnp.asarray(arrays["clip"])
        contexts["loss_encoder"] = encoder(text, clip)
    if "loss_mllm" in arrays:
        contexts["loss_mllm"] = arrays["mllm_train"][:, 0]
    for name, context in contexts.items():
        v = _predict(dit, noised, arrays["idx"], arrays["flow"], context)
        loss = diffusion.v_loss(v, target)
        yield close(f"loss: {name.removeprefix('loss_')}", loss, arrays[name], NETWORK)


# VAE and CLIP


def compare_vae(vae: Any, arrays: Arrays) -> Iterator[Row]:
    """Compares moments of a clip and of an image, and latents decoded in the recorded chunks."""
    encode = jax.jit(lambda vae, video: vae.encode(video))
    decode = jax.jit(lambda vae, latents, cache: vae.decode_chunk(latents, cache))
    for name, frames in (("moments", None), ("image_moments", 1)):
        if name in arrays:
            video = jnp.asarray(np.moveaxis(arrays["video"], 1, -1))[:, :frames]
            expected = np.moveaxis(arrays[name], 1, -1)
            yield close(f"vae: {name.replace('_', ' ')}", encode(vae, video), expected, NETWORK)
    if "latents" not in arrays:
        return
    latents = jnp.asarray(np.moveaxis(arrays["latents"], 1, -1))
    if "decoded_in_chunks" in arrays:
        chunks, cache = [], None
        for start, stop in arrays["chunk_bounds"]:
            frames, cache = decode(vae, latents[:, int(start) : int(stop)], cache)
            chunks.append(np.asarray(frames))
        expected = np.moveaxis(arrays["decoded_in_chunks"], 1, -1)
        yield close("vae: decoded in chunks", np.concatenate(chunks, axis=1), expected, NETWORK)
    if "decoded_first_latent_only" in arrays:
        first, _ = decode(vae, latents[:, :1], None)
        expected = np.moveaxis(arrays["decoded_first_latent_only"], 1, -1)
        yield close("vae: first latent decoded alone", first, expected, NETWORK)


def compare_clip(clip: Any, arrays: Arrays) -> Iterator[Row]:
    """Compares the released preprocessing, and the features of the last block but one."""
    pixels = np.moveaxis(arrays["preprocessed"], 1, -1)
    if "image" in arrays:
        image = jnp.asarray(np.moveaxis(arrays["image"], 1, -1))
        yield close("clip: preprocessed", clip.preprocess(image), pixels, NETWORK)
    if "features" in arrays:
        features = jax.jit(lambda clip, pixels: clip.image_features(pixels))(clip, pixels)
        yield close("clip: features", features, arrays["features"], NETWORK)


# The folder


class _Arrays(dict[str, np.ndarray]):
    """Arrays of one file; a missing one raises `UserError`."""

    def __init__(self, path: Path, arrays: Arrays):
        super().__init__(arrays)
        self.path = path

    def __missing__(self, name: str) -> np.ndarray:
        raise UserError(f"{self.path}: the array {name!r} is missing")


_CONTEXTS = {"text", "clip", "mllm_train"}  # of a loss, which may be those of the forward pass


def _arrays(path: Path) -> Arrays:
    with open_arrays(path, expected="an .npz file of plain arrays") as file:
        arrays = {name: file.read(name) for name in file.names}
    forward = path.with_name("dit_forward.npz")
    missing = _CONTEXTS - arrays.keys() if path.name == "diffusion_loss.npz" else set()
    if missing and forward.is_file():
        with open_arrays(forward, expected="an .npz file of plain arrays") as file:
            arrays |= {name: file.read(name) for name in missing & set(file.names)}
    return _Arrays(path, arrays)


def compare(folder: Path, bundle: Bundle) -> Iterator[Row]:
    """Yields all comparisons for which `folder` has arrays and `bundle` has networks.

    Recorded results may be missing; their inputs may not.

    Raises:
        UserError: An array is missing, or does not fit the checkpoint.
    """

    def load(name: Any) -> Any:
        return bundle.load(name, dtype="float32", param_dtype="float32")

    def run(pattern: str, rows: Callable[..., Iterator[Row]], *networks: Any) -> Iterator[Row]:
        for path in sorted(folder.glob(pattern)):
            try:
                yield from rows(*networks, _arrays(path))
            except UserError:
                raise
            except Exception as error:  # of any shape, in any of the networks
                first = first_line(error)
                raise UserError(f"{path}: its arrays do not fit the checkpoint: {first}") from error

    if bundle.has("mllm"):
        mllm = load("mllm")
        if (folder / "mllm" / "rollout.npz").is_file():
            if not (folder / "tokenizer").is_dir():
                raise UserError(
                    f"{folder / 'tokenizer'}: no such folder; the instructions of "
                    "mllm/rollout.npz need the checkpoint's tokenizer"
                )
            config = mllm.config
            tokenizer = Tokenizer.load(
                bundle.tokenizer_dir,
                vocab_size=config.mistral.vocab_size,
                num_queries=config.num_queries,
            )
            yield from run("mllm/rollout.npz", compare_rollout, mllm, tokenizer)
        yield from run("mllm/training_loss.npz", compare_mllm_losses, mllm)
    if bundle.has("dit") and bundle.has("encoder"):
        decoder = load("dit"), load("encoder")
        yield from run("vdm/dit_forward.npz", compare_dit, *decoder)
        yield from run("vdm/sample_*.npz", compare_sampler, *decoder)
        yield from run("vdm/diffusion_loss.npz", compare_diffusion_losses, *decoder)
    if bundle.has("vae"):
        yield from run("vae/vae.npz", compare_vae, load("vae"))
    if bundle.has("clip"):
        yield from run("clip/clip.npz", compare_clip, load("clip"))


def _latent_size(folder: Path) -> tuple[int, int] | tuple[None, None]:
    """Returns height and width of the recorded latents, which the decoder's file does not give."""
    for path in sorted(folder.glob("vdm/*.npz")):
        arrays = _arrays(path)
        for name in ("x", "x0", "clean"):
            if name in arrays and arrays[name].ndim == 5:
                height, width = arrays[name].shape[-2:]
                return height, width
    return None, None


def compare_folder(folder: Path) -> list[Row]:
    """Converts the checkpoints of a reference folder and compares everything that it recorded.

    Raises:
        UserError: The folder does not exist or holds nothing to compare, or one of its files is
            damaged.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected checkpoints and recorded arrays")
    if not list(folder.glob("*/*.npz")):
        raise UserError(f"{folder}: no recorded arrays there (expected mllm/rollout.npz and such)")
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "bundle"
        height, width = _latent_size(folder)
        options = ConvertOptions(
            out=str(out), reference=folder, latent_height=height, latent_width=width
        )
        convert_released(options, must_fit=False)  # networks are compared one by one
        with jax.default_matmul_precision("highest"):
            rows = list(compare(folder, Bundle.open(out)))
    if not rows:
        raise UserError(f"{folder}: arrays, but no checkpoint that they belong to")
    return rows


def print_rows(rows: list[Row]) -> None:
    """Prints a table of the comparisons, and how many pass."""
    from rich.console import Console
    from rich.table import Table

    table = Table("quantity", "shape", box=None)
    for column in ("max error", "error / RMS", "tolerance", "result"):
        table.add_column(column, justify="right")
    for row in rows:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        color = "green" if row.result == "pass" else "bold red"
        numbers = (
            (f"{row.max_error:.0f} differ", "", "exact")
            if row.tolerance == 0
            else (f"{row.max_error:.2e}", f"{row.relative_error:.2e}", f"{row.tolerance:.0e}")
        )
        table.add_row(row.quantity, shape, *numbers, f"[{color}]{row.result}[/]")
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table)
    num_passed = sum(row.result == "pass" for row in rows)
    print(f"{num_passed} of {len(rows)} rows pass")


def write_rows(path: Path, rows: list[Row]) -> None:
    """Writes the comparisons as JSON; an infinite error is null."""

    def fields(row: Row) -> dict[str, Any]:
        return to_json(row, leaf=lambda value: None if value == np.inf else value)

    write_json(absolute(path), [fields(row) | {"result": row.result} for row in rows])
