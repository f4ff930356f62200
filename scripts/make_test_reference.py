"""Makes `tests/reference/vdm` and `tests/reference/mllm` from a folder of recorded numbers.

    python scripts/make_test_reference.py REFERENCE [OUT]

REFERENCE is laid out as `animegamer parity` reads it (`docs/parity.md`); OUT is `tests/reference`
by default. The decoder is copied, except for arrays that two of its files share. Of the language
model's 32,284 vocabulary rows, only those of recorded sequences and special tokens are kept; ids
are renumbered and logits cut accordingly. No tokenizer is copied.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import MistralConfig, MistralForCausalLM

AGENT = "llm.base_model.model."
ROWS = (f"{AGENT}model.embed_tokens.weight", f"{AGENT}lm_head.weight")
# Generated text and parsed states follow from the greedy ids; a turn's history is made of the
# released representations of the turns before it.
DROPPED = ("generated_text", "states", "history_embeds", "instructions")
SHARED = ("clip", "text", "mllm_train")  # the same numbers in both of the decoder's batches


def read(path: Path) -> dict[str, np.ndarray]:
    """Returns all arrays of an .npz file."""
    with np.load(path) as file:
        return dict(file)


def make_decoder(reference: Path, out: Path) -> None:
    """Copies the checkpoint, and the loss's inputs that differ from the forward pass's."""
    names = ("latest", "config.json", "1/mp_rank_00_model_states.pt", "sample_50.npz")
    forward, loss = (read(reference / f"{name}.npz") for name in ("dit_forward", "diffusion_loss"))
    for name in SHARED:
        np.testing.assert_array_equal(forward[name], loss.pop(name))
    shutil.rmtree(out, ignore_errors=True)  # only now that REFERENCE has been read
    (out / "1").mkdir(parents=True)
    for name in (*names, "dit_forward.npz"):
        shutil.copyfile(reference / name, out / name)
    np.savez_compressed(out / "diffusion_loss.npz", **loss)


def special_tokens(tokenizer: Path) -> dict[str, int]:
    """Returns every token that is not in the base model's text vocabulary."""
    return {"<s>": 1, **json.loads((tokenizer / "added_tokens.json").read_text())}


def language_loss(
    weights: dict[str, np.ndarray], config: dict, arrays: dict[str, np.ndarray]
) -> float:
    """Returns transformers' cross-entropy, with the low-rank updates folded in."""
    tensors = {name: torch.from_numpy(value).float() for name, value in weights.items()}
    state = {}
    for name, value in tensors.items():
        if not name.startswith(AGENT) or ".lora_" in name:
            continue
        plain = name.removeprefix(AGENT).replace(".modules_to_save.default", "")
        if ".base_layer" in name:
            stem = name.removesuffix(".base_layer.weight")
            a, b = (tensors[f"{stem}.lora_{letter}.default.weight"] for letter in "AB")
            value, plain = value + b @ a, plain.replace(".base_layer", "")
        state[plain] = value
    sizes = config | {"vocab_size": len(state["lm_head.weight"])}
    sizes.pop("torch_dtype")
    model = MistralForCausalLM(MistralConfig(**sizes, attn_implementation="eager")).float().eval()
    model.load_state_dict(state)
    # The release keeps the rotary tables in the checkpoint's float16.
    model.model.rotary_emb.register_forward_hook(
        lambda module, args, tables: tuple(table.half().float() for table in tables)
    )
    parts = [f"{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    resampler = [tensors[f"input_resampler.proj.{part}"] for part in parts]
    ids, mask, labels = (
        torch.from_numpy(arrays[name]) for name in ("input_ids", "attention_mask", "labels")
    )
    x = model.get_input_embeddings()(ids)
    history = torch.from_numpy(arrays["turn_embeds"]).flatten(1, 2)
    linear, gelu = torch.nn.functional.linear, torch.nn.functional.gelu
    history = linear(gelu(linear(history, *resampler[:2])), *resampler[2:])
    for row, where in enumerate(torch.from_numpy(arrays["history_mask"])):
        x[row, where] = history[row, : int(where.sum())]
    seen = torch.tril(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool))
    block = mask == -1
    seen = (seen | block[:, :, None] & block[:, None, :]) & (mask != 0)[:, None, :]
    bias = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]
    positions = ((mask != 0).cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(inputs_embeds=x, attention_mask=bias, position_ids=positions).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return float(loss)


def make_language_model(reference: Path, tokenizer: Path, out: Path) -> None:
    """Writes weights and recorded numbers, cut to the vocabulary rows of recorded sequences."""
    rollout, batch = read(reference / "rollout.npz"), read(reference / "training_loss.npz")
    special = special_tokens(tokenizer)
    used = set(special.values()) | set(batch["input_ids"].ravel().tolist())
    for name, array in rollout.items():
        if name.endswith("_ids"):
            used |= set(array.tolist())
    kept = np.array(sorted(used))
    new_id = {int(old): new for new, old in enumerate(kept)}
    renumber = np.vectorize(lambda old: new_id.get(old, old), otypes=[np.int64])

    content = torch.load(reference / "pytorch_model.bin", weights_only=True)
    weights = {name: tensor.numpy() for name, tensor in content.items()}
    weights = {name: value for name, value in weights.items() if ".original_module." not in name}
    config = json.loads((reference / "Mistral-tiny" / "config.json").read_text())
    whole = language_loss(weights, config, batch)
    np.testing.assert_allclose(whole, batch["lm_loss"], rtol=1e-6)
    for name in ROWS:
        weights[name] = weights[name][kept]

    arrays = {}
    for name, array in rollout.items():
        if name.endswith(DROPPED):
            continue
        if name.endswith("_ids"):
            array = renumber(array)
        elif name.endswith("_logits"):
            array = array[kept]
        arrays[name] = array
    batch["input_ids"], batch["labels"] = renumber(batch["input_ids"]), renumber(batch["labels"])
    # With rows cut from the softmax, the loss differs from the recorded one; so transformers
    # computes it, which has just reproduced the recorded one with all rows.
    batch["lm_loss"] = np.float32(language_loss(weights, config, batch))
    batch["total_loss"] = batch["lm_loss"] + batch["rec_loss"]

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    np.savez_compressed(out / "weights.npz", **weights)
    np.savez_compressed(out / "rollout.npz", **arrays)
    np.savez_compressed(out / "training_loss.npz", **batch)
    config["vocab_size"] = len(kept)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokens = {token: new_id[old] for token, old in special.items()}
    (out / "tokens.json").write_text(json.dumps(tokens, indent=0) + "\n")
    print(f"{len(kept)} vocabulary rows; cross-entropy {whole:.6f} -> {batch['lm_loss']:.6f}")


def main() -> None:
    """Writes both folders and prints their sizes."""
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    reference = Path(sys.argv[1])
    tests = Path(__file__).parent.parent / "tests" / "reference"
    out = Path(sys.argv[2]) if len(sys.argv) == 3 else tests
    make_decoder(reference / "vdm", out / "vdm")
    make_language_model(reference / "mllm", reference / "tokenizer", out / "mllm")
    for folder in ("vdm", "mllm"):
        size = sum(path.stat().st_size for path in (out / folder).rglob("*") if path.is_file())
        print(f"{out / folder}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
