"""Parity: every number that a reference folder recorded, against this code.

The folder is laid out like the released checkpoints with arrays beside them: `mllm/`, `vdm/`,
`vae/`, `clip/`, `tokenizer/` (`docs/parity.md` has the arrays' names and shapes). What is there is
converted to a bundle, loaded from it in float32, and compared; so the whole way is under test.
"""

import dataclasses
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from animegamer_jax import diffusion
from animegamer_jax.bundle import Bundle
from animegamer_jax.errors import UserError
from animegamer_jax.models.mistral import Tokens
from animegamer_jax.models.mllm import IGNORED, MLLM, GameBatch
from animegamer_jax.protocol import RELEASED, Layout, Prompt
from animegamer_jax.tokenizer import Tokenizer

# Largest error over the reference's RMS: tables and losses; networks; 50 calls of one.
TABLE, NETWORK, SAMPLER = 1e-5, 1e-4, 1e-3

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison. For exact quantities `tolerance` is 0 and the error counts differences."""

    quantity: str
    shape: tuple[int, ...]
    max_error: float
    relative_error: float
    tolerance: float

    @property
    def verdict(self) -> Literal["pass", "FAIL"]:
        return "pass" if self.relative_error <= self.tolerance else "FAIL"


def close(quantity: str, found: Any, expected: Any, tolerance: float) -> Row:
    """A row for real numbers; a wrong shape or a NaN fails whatever the tolerance."""
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
    """A row for ids and masks: the number of entries that differ."""
    found, expected = np.asarray(found), np.asarray(expected)
    differ = (
        int((found != expected).sum())
        if found.shape == expected.shape
        else max(found.size, expected.size)
    )
    return Row(quantity, expected.shape, float(differ), float(differ), 0.0)


def channels_last(x: np.ndarray, channels: int) -> np.ndarray:
    """Moves PyTorch's channel axis behind the others."""
    return np.moveaxis(x, channels, -1)


# The MLLM


def _prompt(
    layout: Layout, tokenizer: Tokenizer, instructions: list[str], num_history: int
) -> Prompt:
    """The layout of one game's turn; `instructions` end with this turn's."""
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
    """What the recorded arrays hold of one prompt, under both masks."""
    answers = {}
    for mask in ("bidirectional", "causal"):
        hidden, cache = mllm.prefill(
            prompt,
            history,
            layout,
            bidirectional=mask == "bidirectional",
            extra_slots=num_greedy,
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
    """Every turn of every recorded window: ids, masks, logits, representations, greedy ids."""
    found = {re.fullmatch(r"w(\d+)_instructions", name) for name in arrays} - {None}
    for window in sorted(int(match[1]) for match in found if match):
        instructions = [str(text) for text in arrays[f"w{window}_instructions"]]
        longest = max(len(tokenizer.encode(text)) for text in instructions)
        protocol = dataclasses.replace(
            RELEASED, window=window, caption_length=max(longest, RELEASED.caption_length)
        )
        n, size = mllm.config.num_queries, mllm.config.representation_size
        layout = Layout(protocol, tokenizer.ids, num_queries=n, window=window)
        num_greedy = len(arrays[f"w{window}_t0_causal_greedy_ids"])
        run = jax.jit(
            lambda mllm, prompt, history, layout=layout, num_greedy=num_greedy: _answers(
                mllm, prompt, history, layout, num_greedy=num_greedy
            )
        )
        for turn in range(len(instructions)):
            past = range(max(0, turn - window + 1), turn)
            prompt = _prompt(layout, tokenizer, [instructions[t] for t in (*past, turn)], len(past))
            history = np.zeros((1, window - 1, n, size), np.float32)
            for back, t in enumerate(reversed(past)):
                history[0, -1 - back] = arrays[f"w{window}_t{t}_released_rep"]
            key, name = f"w{window}_t{turn}_", f"mllm: window {window}, turn {turn + 1}, "
            valid = np.asarray(prompt.valid[0])
            is_query = np.zeros(layout.length, bool)
            is_query[layout.queries] = True
            yield exact(name + "ids", np.asarray(prompt.ids[0])[valid], arrays[key + "input_ids"])
            recorded = arrays[key + "attention_mask"]
            yield exact(name + "mask", np.where(is_query[valid], -1, 1), recorded)
            yield exact(name + "queries", is_query[valid], arrays[key + "query_mask"])
            yield exact(name + "history", layout.history[valid], arrays[key + "history_mask"])
            answers = run(mllm, prompt, jnp.asarray(history.reshape(1, -1, size)))
            for quantity, value in answers.items():
                title, expected = name + quantity.replace("_", " "), arrays[key + quantity]
                if quantity.endswith("ids"):
                    yield exact(title, value, expected)
                else:
                    yield close(title, value, expected, NETWORK)


def compare_mllm_losses(mllm: MLLM, arrays: Arrays) -> Iterator[Row]:
    """Cross-entropy, reconstruction and their sum on a padded batch of games."""
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
        labels=jnp.asarray(arrays["labels"], jnp.int32),
        history_mask=jnp.asarray(arrays["history_mask"]),
        history=jnp.asarray(embeds.reshape(len(embeds), -1, embeds.shape[-1])),
        query_slots=jnp.asarray(queries),
        target=jnp.asarray(embeds[rows, arrays["target_turn"]]),
    )
    assert IGNORED == -100  # the recorded labels' mark
    language, representation = jax.jit(lambda mllm, batch: mllm.losses(batch))(mllm, batch)
    found = {
        "lm_loss": language,
        "rec_loss": representation,
        "total_loss": language + representation,
    }
    for name, value in found.items():
        yield close(f"mllm: {name.replace('_', ' ')}", value, arrays[name], TABLE)


# The decoder


def _predict(dit: Any, x: Any, timestep: Any, motion: Any, context: Any) -> jax.Array:
    numbers = (jnp.asarray(value, jnp.float32) for value in (x, timestep, motion, context))
    x, timestep, motion, context = numbers
    return _run_dit(dit, x, timestep, motion, context)


@jax.jit
def _run_dit(dit, x, timestep, motion, context):
    return dit(x, timestep=timestep, motion=motion, context=context)


def compare_dit(dit: Any, encoder: Any, arrays: Arrays) -> Iterator[Row]:
    """E_a's context, and the transformer under it and under the MLLM's representations."""
    context = encoder(jnp.asarray(arrays["text"]), jnp.asarray(arrays["clip"]))
    yield close("encoder: context", context, arrays["context"], NETWORK)
    mixed = np.concatenate([arrays["context"][:1], arrays["mllm"]])
    contexts = {
        "out_encoder": arrays["context"],
        "out_mllm": mixed,
        "out_mllm_train": arrays["mllm_train"][:, 0],
    }
    x = channels_last(arrays["x"], 2)
    for name, rows in contexts.items():
        v = _predict(dit, x, arrays["timestep"], arrays["flow"], rows)
        yield close(f"dit: {name}", v, channels_last(arrays[name], 2), NETWORK)


def compare_sampler(dit: Any, encoder: Any, arrays: Arrays) -> Iterator[Row]:
    """The schedules, and the whole sampler with the recorded noise."""
    num_steps = len(arrays["cfg_scale"])
    table = diffusion.make_sampler_table(diffusion.Schedule(), num_steps)
    levels = diffusion.Schedule().signal_levels(diffusion.Schedule().sampling_steps(num_steps))
    recorded = arrays["alphas_cumprod_sqrt"]
    yield close("sampler: signal levels", np.append(levels[::-1], 1.0), recorded, TABLE)
    yield close("sampler: timesteps", table.timestep, arrays["sigma_idx"][:, 1], 0.0)
    scale = diffusion.Schedule().guidance(np.asarray(table.timestep))
    yield close("sampler: guidance", scale, arrays["cfg_scale"], 1e-9)

    # Recorded in call order: one draw in the first step, then two a step of which the second is
    # used, none in the last.
    draws = channels_last(arrays["noise_draws"], 3)
    used = [draws[0], *draws[2 : 2 * (num_steps - 1) : 2], np.zeros_like(draws[0])]
    noise = jnp.asarray(np.stack(used), jnp.float32)
    motion = float(arrays["flow"])

    @jax.jit
    def run(dit: Any, encoder: Any, x: jax.Array, context: jax.Array, noise: jax.Array):
        def predict_v(x: jax.Array, timestep: jax.Array, context: jax.Array) -> jax.Array:
            motions = jnp.full(x.shape[:1], motion)
            return dit(x, timestep=timestep, motion=motions, context=context)

        guided = diffusion.guide(predict_v, context, encoder.unconditional())
        start = diffusion.start_sampler(x)
        return diffusion.sample(guided, start, table, noise=lambda i: noise[i]).x

    x0 = jnp.asarray(channels_last(arrays["x0"], 2))
    out = run(dit, encoder, x0, jnp.asarray(arrays["mllm"]), noise)
    yield close(f"sampler: {num_steps} steps", out, channels_last(arrays["out"], 2), SAMPLER)


def compare_diffusion_losses(dit: Any, encoder: Any, arrays: Arrays) -> Iterator[Row]:
    """The noise levels of training, and the loss with either context."""
    schedule = diffusion.Schedule()
    yield close("loss: signal levels", schedule.signal_levels(), arrays["sigmas"], TABLE)
    clean, noise = (jnp.asarray(channels_last(arrays[name], 2)) for name in ("clean", "noise"))
    noised, target = diffusion.add_noise(
        schedule, clean, noise, jnp.asarray(arrays["idx"], jnp.int32)
    )
    contexts = {
        "loss_encoder": encoder(jnp.asarray(arrays["text"]), jnp.asarray(arrays["clip"])),
        "loss_mllm": arrays["mllm_train"][:, 0],
    }
    for name, context in contexts.items():
        v = _predict(dit, noised, arrays["idx"], arrays["flow"], context)
        loss = diffusion.v_loss(v, target)
        yield close(f"loss: {name.removeprefix('loss_')}", loss, arrays[name], TABLE)


# VAE and CLIP


def compare_vae(vae: Any, arrays: Arrays) -> Iterator[Row]:
    """Moments of a clip and of a picture; latents decoded in the recorded chunks."""
    encode = jax.jit(lambda vae, video: vae.encode(video))
    decode = jax.jit(lambda vae, latents, cache: vae.decode_chunk(latents, cache))
    video = jnp.asarray(channels_last(arrays["video"], 1))
    for name, part in (("moments", video), ("image_moments", video[:, :1])):
        expected = channels_last(arrays[name], 1)
        yield close(f"vae: {name.replace('_', ' ')}", encode(vae, part), expected, NETWORK)
    latents = jnp.asarray(channels_last(arrays["latents"], 1))
    chunks, cache = [], None
    for start, stop in arrays["chunk_bounds"]:
        frames, cache = decode(vae, latents[:, int(start) : int(stop)], cache)
        chunks.append(np.asarray(frames))
    expected = channels_last(arrays["decoded_in_chunks"], 1)
    yield close("vae: decoded in chunks", np.concatenate(chunks, axis=1), expected, NETWORK)
    if "decoded_first_latent_only" in arrays:
        first, _ = decode(vae, latents[:, :1], None)
        expected = channels_last(arrays["decoded_first_latent_only"], 1)
        yield close("vae: first latent decoded alone", first, expected, NETWORK)


def compare_clip(clip: Any, arrays: Arrays) -> Iterator[Row]:
    """The released preprocessing, and the features of the last block but one."""
    image = jnp.asarray(channels_last(arrays["image"], 1))
    recorded = channels_last(arrays["preprocessed"], 1)
    yield close("clip: preprocessed", clip.preprocess(image), recorded, NETWORK)
    features = jax.jit(lambda clip, pixels: clip.image_features(pixels))(clip, recorded)
    yield close("clip: features", features, arrays["features"], NETWORK)


# The command


class _Arrays(dict[str, np.ndarray]):
    """The arrays of one file, which say so when one is asked for that is not there."""

    def __init__(self, path: Path, arrays: Arrays):
        super().__init__(arrays)
        self.path = path

    def __missing__(self, name: str) -> np.ndarray:
        raise UserError(f"{self.path}: the array {name!r} is missing")


def _arrays(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            return _Arrays(path, file)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: not an .npz file of plain arrays ({error})") from error


def compare(folder: Path, bundle: Bundle) -> Iterator[Row]:
    """All comparisons for which `folder` has arrays and `bundle` the networks."""

    def load(name: Any) -> Any:
        return bundle.load(name, dtype="float32", param_dtype="float32")

    def recorded(*names: str) -> Iterator[tuple[str, Arrays]]:
        for name in names:
            for path in sorted(folder.glob(name)):
                yield path.name, _arrays(path)

    if bundle.has("mllm"):
        mllm = load("mllm")
        for name, arrays in recorded("mllm/rollout.npz", "mllm/training_loss.npz"):
            if name == "rollout.npz":
                tokenizer = Tokenizer.load(
                    bundle.tokenizer_dir,
                    vocab_size=mllm.config.mistral.vocab_size,
                    num_queries=mllm.config.num_queries,
                )
                yield from compare_rollout(mllm, tokenizer, arrays)
            else:
                yield from compare_mllm_losses(mllm, arrays)
    if bundle.has("dit") and bundle.has("encoder"):
        dit, encoder = load("dit"), load("encoder")
        for _, arrays in recorded("vdm/dit_forward.npz"):
            yield from compare_dit(dit, encoder, arrays)
        for _, arrays in recorded("vdm/sample_*.npz"):
            yield from compare_sampler(dit, encoder, arrays)
        for _, arrays in recorded("vdm/diffusion_loss.npz"):
            yield from compare_diffusion_losses(dit, encoder, arrays)
    if bundle.has("vae"):
        for _, arrays in recorded("vae/vae.npz"):
            yield from compare_vae(load("vae"), arrays)
    if bundle.has("clip"):
        for _, arrays in recorded("clip/clip.npz"):
            yield from compare_clip(load("clip"), arrays)


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("quantity", "shape", box=None)
    for column in ("max error", "error / RMS", "tolerance", "verdict"):
        table.add_column(column, justify="right")
    for row in rows:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        color = "green" if row.verdict == "pass" else "bold red"
        numbers = (
            (f"{row.max_error:.0f} differ", "", "exact")
            if row.tolerance == 0
            else (f"{row.max_error:.2e}", f"{row.relative_error:.2e}", f"{row.tolerance:.0e}")
        )
        table.add_row(row.quantity, shape, *numbers, f"[{color}]{row.verdict}[/]")
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table)


def parity(
    folder: Annotated[Path, tyro.conf.Positional],
    /,
    *,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Compares every number that FOLDER recorded with this code, in float32.

    Args:
        folder: checkpoints and arrays, laid out as `docs/parity.md` says.
        json_file: the table as JSON, too.

    Returns:
        The exit status: 1 if a row fails.

    Raises:
        UserError: the folder is missing, holds nothing to compare, or a file of it is bad.
    """
    from animegamer_jax.convert.released import convert

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected checkpoints and recorded arrays")
    if not list(folder.glob("*/*.npz")):
        raise UserError(f"{folder}: no recorded arrays there (expected mllm/rollout.npz and such)")
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "bundle"
        convert(out=str(out), reference=folder)
        with jax.default_matmul_precision("highest"):
            rows = list(compare(folder, Bundle.open(out)))
    if not rows:
        raise UserError(f"{folder}: arrays, but no checkpoint that they belong to")
    _print(rows)
    failed = [row for row in rows if row.verdict == "FAIL"]
    print(f"{len(rows) - len(failed)} of {len(rows)} rows pass")
    if json_file:
        entries = [dataclasses.asdict(row) | {"verdict": row.verdict} for row in rows]
        json_file.write_text(json.dumps(entries, indent=1) + "\n")
    return 1 if failed else 0
