r"""Records numbers of the PyTorch release, from a checkout of it, for `animegamer parity`.

    python scripts/record_parity.py CHECKOUT DIR --vae 3d-vae.pt --decoder VDM_Decoder-Qiqi \
        --agent pytorch_model.bin --mistral Mistral-7B-Instruct-v0.1 --tokenizer TOKENIZER
    animegamer parity DIR

CHECKOUT is a clone of https://github.com/TencentARC/AnimeGamer. Its own modules compute everything,
on the CPU in float32, from random inputs; the sizes of the networks follow from the checkpoints.
Each network is optional. The script needs nothing of animegamer_jax; which packages of the
release's environment it needs: docs/compare-with-pytorch.md.
"""

import argparse
import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

_CHUNKS = ((0, 3), (3, 5))  # latent frames, as inference_Decoder.py decodes five
_QUERIES, _PATCHES = 226, 196  # tokens of a representation; of these, those of a picture
_TURNS, _WINDOWS, _GREEDY = 4, (1, 3), 8  # turns of a game, turns in a prompt, greedy tokens
_STATE = "<ML>{0}</ML><SC>{0}</SC><ET>{0}</ET><ST>{0}</ST></ST></TURN>".format("<Strength_0>")
_BLOCK = f"<img><frame>{''.join(f'<frame_{i:05d}>' for i in range(_QUERIES))}</frame></img>"


def stand_in(name: str, **attributes: Any) -> None:
    """Puts a module of these attributes where another would be imported."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


def import_release(checkout: Path) -> None:
    """Makes the release's modules importable, without what only training or a GPU needs.

    Its packages import all of the release when they are imported; so they stand in as empty
    packages. The same holds for SwissArmyTransformer, of which the transformer needs four modules.
    """
    if not (checkout / "VDM_Decoder" / "vae_modules" / "cp_enc_dec.py").is_file():
        raise SystemExit(f"{checkout}: expected a clone of AnimeGamer with VDM_Decoder/vae_modules")
    sys.path.insert(0, str(checkout))
    for name in ("", ".sgm", ".sgm.models", ".sgm.modules", ".sgm.modules.diffusionmodules"):
        folder = checkout / f"VDM_Decoder{name}".replace(".", "/")
        stand_in(f"VDM_Decoder{name}", __path__=[str(folder)])
    stand_in("VDM_Decoder.vae_modules", __path__=[str(checkout / "VDM_Decoder" / "vae_modules")])
    stand_in("VDM_Decoder.sgm.modules.autoencoding.lpips.loss.lpips", LPIPS=None)
    stand_in("MLLM.src.models.vit", Block=None)
    stand_in("pyrootutils", setup_root=lambda *_, **__: None)
    stand_in("hydra")
    zero = types.SimpleNamespace(GatheredParameters=lambda *_, **__: contextlib.nullcontext())
    checkpointing = types.SimpleNamespace(is_configured=lambda: False)
    spec = importlib.machinery.ModuleSpec("deepspeed", None)  # accelerate asks whether it is there
    stand_in("deepspeed", __spec__=spec, zero=zero, checkpointing=checkpointing)
    store = torch.distributed.HashStore()  # a group of this process alone; no port is opened
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    importlib.import_module("VDM_Decoder.sgm.util").initialize_context_parallel(1)


def import_sat() -> None:
    """Makes the modules of SwissArmyTransformer importable that the transformer needs."""
    spec = importlib.util.find_spec("sat")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("--decoder needs SwissArmyTransformer: pip install --no-deps it")
    root = Path(spec.submodule_search_locations[0])
    for name in ("sat", "sat.model", "sat.model.finetune"):
        stand_in(name, __path__=[str(root.parent / name.replace(".", "/"))])
    mixin = importlib.import_module("sat.model.base_model").BaseMixin
    stand_in("sat.model.mixins", BaseMixin=mixin)


def load(path: Path, *prefixes: str) -> dict[str, torch.Tensor]:
    """Returns a checkpoint's tensors of these prefixes in float32."""
    stored = torch.load(path, map_location="cpu", weights_only=True)
    stored = stored.get("state_dict", stored.get("module", stored))
    return {n: x.float() for n, x in stored.items() if n.startswith(prefixes or ("",))}


def normal(random: np.random.Generator, *shape: int) -> torch.Tensor:
    """Returns Gaussian noise in float32."""
    return torch.from_numpy(random.normal(size=shape).astype(np.float32))


def vae_sizes(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the constructor's arguments of encoder and decoder, from shapes in the checkpoint."""
    first = state["encoder.conv_in.conv.weight"]
    found: dict[int, tuple[int, int]] = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"encoder\.down\.(\d+)\.block\.(\d+)\.conv1\.conv\.weight", name)
        if match:
            level, block = int(match[1]), int(match[2])
            most = found.get(level, (0, 0))[1]
            found[level] = len(tensor), max(most, block + 1)
    widths = [found[level][0] for level in sorted(found)]
    return {
        "ch": len(first),
        "ch_mult": [width // len(first) for width in widths],
        "num_res_blocks": found[0][1],
        "z_channels": state["decoder.conv_in.conv.weight"].shape[1],
        "in_channels": first.shape[1],
        "out_ch": first.shape[1],
        "attn_resolutions": [],
        "resolution": 256,
        "double_z": True,
        "dropout": 0.0,
    }


def record_vae(checkpoint: Path, random: np.random.Generator) -> dict[str, Any]:
    """Returns inputs and results of the release's VAE."""
    module = importlib.import_module("VDM_Decoder.vae_modules.cp_enc_dec")
    state = load(checkpoint, "encoder.", "decoder.")
    sizes = vae_sizes(state)
    encoder = module.ContextParallelEncoder3D(**sizes, gather_norm=True)
    decoder = module.ContextParallelDecoder3D(**sizes, gather_norm=False)
    for part, network in (("encoder", encoder), ("decoder", decoder)):
        own = {n.removeprefix(f"{part}."): x for n, x in state.items() if n.startswith(part)}
        network.load_state_dict(own, strict=True)
        network.eval()
    space = 2 ** (len(sizes["ch_mult"]) - 1)
    video = torch.tanh(normal(random, 1, sizes["in_channels"], 17, 4 * space, 6 * space))
    latents = normal(random, 1, sizes["z_channels"], 5, 4, 6)
    chunks = [
        decoder(latents[:, :, start:stop].contiguous(), clear_fake_cp_cache=stop == 5)
        for start, stop in _CHUNKS
    ]
    return {
        "video": video,
        "moments": encoder(video),
        "image_moments": encoder(video[:, :, :1].contiguous()),
        "latents": latents,
        "decoded_in_chunks": torch.cat(chunks, dim=2),
        "chunk_bounds": np.array(_CHUNKS),
    }


def decoder_config(checkout: Path, folder: Path, state: dict[str, torch.Tensor]) -> Any:
    """Returns the release's configuration with the sizes of this checkpoint.

    Height and width of the latents are in no shape; a config.json may give them (lat_h, lat_w).
    """
    reader = importlib.import_module("omegaconf").OmegaConf

    config = reader.load(checkout / "VDM_Decoder" / "configs" / "cogvideox_2b.yaml").model
    network = config.network_config.params
    own = folder / "config.json"
    given = json.loads(own.read_text()) if own.is_file() else {}
    height = given.get("lat_h", network.latent_height)
    width = given.get("lat_w", network.latent_width)
    proj = state["mixins.patch_embed.proj.weight"]
    hidden, channels, patch, _ = proj.shape
    norm = state["mixins.adaln_layer.query_layernorm_list.0.weight"]  # of one head
    tokens = state["mixins.pos_embed.pos_embedding"].shape[1] - _QUERIES
    frames = tokens // (height // patch * (width // patch))
    network.update(
        latent_height=height,
        latent_width=width,
        num_frames=(frames - 1) * network.time_compressed_rate + 1,
        num_layers=sum(name.endswith(".input_layernorm.weight") for name in state),
        patch_size=patch,
        in_channels=channels,
        out_channels=len(state["mixins.final_layer.linear.bias"]) // patch**2,
        hidden_size=hidden,
        num_attention_heads=hidden // len(norm),
        time_embed_dim=len(state["time_embed.0.bias"]),
        dtype="fp32",
    )
    network.transformer_args.checkpoint_activations = False
    text = state["mixins.patch_embed.text_proj.0.weight"].shape[1]
    network.modules.patch_embed_config.params.text_hidden_size = text
    rank = len(state["transformer.layers.0.attention.dense.matrix_A.0"])
    network.modules.lora_config.params.r = rank
    config.loss_fn_config.params.do_training_cfg = False  # it drops conditions at random
    config.sampler_config.params.update(device="cpu", verbose=False)
    return config


def record_decoder(
    checkout: Path, folder: Path, random: np.random.Generator, seed: int
) -> dict[str, dict[str, Any]]:
    """Returns inputs and results of the transformer, of its sampler and of its loss."""
    import_sat()
    make = importlib.import_module("VDM_Decoder.sgm.util").instantiate_from_config
    wrapper = importlib.import_module("VDM_Decoder.sgm.modules.diffusionmodules.wrappers")
    latest = (folder / "latest").read_text().strip()
    prefix = "model.diffusion_model."
    state = load(folder / latest / "mp_rank_00_model_states.pt", prefix)
    state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    config = decoder_config(checkout, folder, state)
    transformer = make(config.network_config)
    transformer.load_state_dict(state, strict=True)
    network = wrapper.OpenAIWrapper(transformer.eval())

    sizes = config.network_config.params
    frames = (sizes.num_frames - 1) // sizes.time_compressed_rate + 1
    shape = (frames, sizes.in_channels, sizes.latent_height, sizes.latent_width)
    text_size = state["mixins.patch_embed.text_proj.0.weight"].shape[1]
    clip_size = state["mixins.patch_embed.ip_proj.0.weight"].shape[1]
    text = normal(random, 2, _QUERIES - _PATCHES, text_size)
    clip = normal(random, 2, _PATCHES, clip_size)
    mllm = normal(random, 1, _QUERIES, sizes.hidden_size)
    mllm_train = normal(random, 2, 1, _QUERIES, sizes.hidden_size)
    flow = torch.tensor([0.5, 15.0])

    x, timestep = normal(random, 2, *shape), torch.tensor([37.0, 811.0])
    inputs = {"images": x, "encoder_outputs": text, "ip_encoder_outputs": clip}
    embedded = transformer.mixins["patch_embed"].word_embedding_forward(None, **inputs)

    def forward(**options: Any) -> torch.Tensor:
        condition = {"crossattn": text, "ip_cond": clip}
        return network(x, timestep, condition, flow_idx=flow, **options)

    forwards = {
        "x": x, "timestep": timestep, "flow": flow, "text": text, "clip": clip,
        "mllm": mllm, "mllm_train": mllm_train,
        "context": embedded[:, :_QUERIES],
        "out_encoder": forward(),
        "out_mllm": forward(aroutput=mllm),
        "out_mllm_train": forward(AR_mixemb=mllm_train),
    }  # fmt: skip

    denoiser, sampler = make(config.denoiser_config), make(config.sampler_config)
    x0, motion = normal(random, 1, *shape), torch.tensor(2.5)
    conditions = [
        {"crossattn": value, "ip_cond": torch.zeros_like(clip[:1])}
        for value in (text[:1], torch.zeros_like(text[:1]))
    ]
    _, _, levels, _, _, _, timesteps = sampler.prepare_sampling_loop(x0, *conditions)
    steps = timesteps.flip(0)[: sampler.num_steps]
    torch.manual_seed(seed)
    out = sampler(
        lambda *arguments, **options: denoiser(network, *arguments, **options),
        x0.clone(), conditions[0], uc=conditions[1], flow=motion, aroutput=mllm,
    )  # fmt: skip
    torch.manual_seed(seed)  # the same draws again, which the sampler keeps to itself
    draws = torch.stack([torch.randn_like(x0) for _ in range(2 * sampler.num_steps - 3)])
    scales = [sampler.guider.scale_schedule(None, sampler.num_steps - int(t)) for t in steps]
    sampled = {
        "x0": x0, "mllm": mllm, "flow": motion, "noise_draws": draws, "out": out,
        "alphas_cumprod_sqrt": levels,
        "sigma_idx": torch.stack([levels[:-1], steps], dim=1),
        "cfg_scale": np.array(scales),
    }  # fmt: skip

    compute = make(config.loss_fn_config)
    clean, index = normal(random, 2, *shape), torch.tensor([3, 640])
    compute.sigma_sampler = lambda *_, **__: (denoiser.sigmas[index], index)

    def loss(**batch: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        batch |= {"ip_img": clip, "motion": flow}
        condition = {"crossattn": text}
        return compute(network, denoiser, lambda _: condition, lambda found: found, clean, batch)

    torch.manual_seed(seed)
    losses = {
        "clean": clean, "noise": torch.randn_like(clean), "idx": index, "flow": flow,
        "text": text, "clip": clip, "mllm_train": mllm_train, "sigmas": denoiser.sigmas,
        "loss_encoder": loss(), "loss_mllm": loss(AR_mixemb=mllm_train),
    }  # fmt: skip
    return {
        "dit_forward": forwards, f"sample_{sampler.num_steps}": sampled, "diffusion_loss": losses,
    }  # fmt: skip


def load_agent(checkout: Path, checkpoint: Path, mistral: Path) -> Any:
    """Returns the release's language model with its resamplers."""
    reader = importlib.import_module("omegaconf").OmegaConf
    peft = importlib.import_module("peft")

    source = "MLLM.src."
    peft_models = importlib.import_module(source + "models_clm.peft_models")
    base = importlib.import_module(source + "models.mistral.modeling_mistral").MistralForCausalLM
    layer = importlib.import_module(source + "models.discrete_models").ProjectionLayer
    agent = importlib.import_module(source + "models_clm.models").ContinuousLVLM_Video
    state = load(checkpoint)
    path = checkout / "MLLM" / "configs" / "clm_models" / "mistral-7b.yaml"
    lora: Any = reader.to_container(reader.load(path).peft_config)
    lora = {name: value for name, value in lora.items() if not name.startswith("_")}
    rank = next(len(tensor) for name, tensor in state.items() if ".lora_A." in name)
    lora |= {"r": rank, "lora_alpha": rank * lora["lora_alpha"] // lora["r"]}
    llm = peft_models.peft_model_animegamer(
        base.from_pretrained(mistral, torch_dtype="auto"),  # so are its rotary tables rounded
        peft_config=peft.LoraConfig(**lora),
        vocab_size=len(state["llm.base_model.model.lm_head.weight"]),
    )
    resamplers = []
    for name in ("input_resampler", "output_resampler"):
        to, size = state[f"{name}.proj.0.weight"].shape
        resamplers.append(layer(_QUERIES, size, size, to))
    network = agent(llm, *resamplers, num_frames=1, rec_loss_scale=1.0).float()
    network.load_state_dict(state, strict=True)
    return network.eval()


def prompt(tokenizer: Any, instructions: list[str], *, ended: bool = False) -> list[torch.Tensor]:
    """Returns ids, and where the queries, past representations and the last turn's state are."""
    ids, marks = [tokenizer.bos_token_id], [""]
    for turn, text in enumerate(instructions, 1 - len(instructions)):
        state = _STATE if turn < 0 or ended else "<ML>"
        for kind, piece in (("", f"<TURN>{text}"), ("block", _BLOCK), ("state", state)):
            found = tokenizer.encode(piece, add_special_tokens=False)
            ids += found
            mark = f"{kind} {turn == 0}" if kind else ""
            inside = [mark] * len(found)
            if kind == "block":
                inside[:2] = inside[-2:] = ["", ""]  # the marks around the queries
            marks += inside
    where = [[mark == kind for mark in marks] for kind in ("block True", "block False")]
    where.append([mark == "state True" for mark in marks])
    return [torch.tensor([values]) for values in (ids, *where)]


def record_rollout(agent: Any, tokenizer: Any, instructions: list[str]) -> dict[str, Any]:
    """Returns every turn of a game: prompt, logits, representations and greedy tokens."""

    def forward(ids: Any, mask: Any, history: Any, past: Any) -> Any:
        embeds = agent.llm.get_input_embeddings()(ids)
        embeds = agent.update_input_embeds(embeds, agent.input_resampler(past), history)
        return agent.llm(inputs_embeds=embeds, attention_mask=mask, output_hidden_states=True)

    arrays: dict[str, Any] = {}
    size = agent.output_resampler.output_dim
    for window in _WINDOWS:
        arrays[f"w{window}_instructions"] = np.array(instructions)
        turns = torch.zeros(1, len(instructions), _QUERIES, size)
        for turn in range(len(instructions)):
            start = max(0, turn - window + 1)
            ids, query, history, _ = prompt(tokenizer, instructions[start : turn + 1])
            past = turns[:, start : start + window]
            block = torch.where(query, -1, 1)
            found = {"input_ids": ids, "attention_mask": block}
            found |= {"query_mask": query, "history_mask": history}
            for name, mask in (("bidirectional", block), ("causal", torch.ones_like(ids))):
                out = forward(ids, mask, history, past)
                found[f"{name}_last_logits"] = out.logits[:, -1]
                if name == "bidirectional":
                    found["masked_rep"] = agent.output_resampler(out.hidden_states[-1][query])[None]
                longer, more = ids, [mask, history]
                for _ in range(_GREEDY):
                    longer = torch.cat([longer, out.logits[:, -1:].argmax(-1)], dim=1)
                    ends = (torch.ones_like(mask[:, :1]), torch.zeros_like(history[:, :1]))
                    more = [torch.cat(pair, dim=1) for pair in zip(more, ends, strict=True)]
                    out = forward(longer, *more, past)
                found[f"{name}_greedy_ids"] = longer[:, -_GREEDY:]
            turns[:, turn] = found["released_rep"] = agent.generate_bi(
                tokenizer, input_ids=ids, attention_mask=block, ids_gen_mask=query,
                ids_cmp_mask=history, video_embeds=past, gen_turn_id=torch.tensor([0]),
                logits_processor=[], num_vid_in_tokens=_QUERIES, device="cpu",
            )  # fmt: skip
            arrays |= {f"w{window}_t{turn}_{name}": value[0] for name, value in found.items()}
    return arrays


def record_loss(
    agent: Any, tokenizer: Any, instructions: list[str], random: np.random.Generator
) -> dict[str, Any]:
    """Returns a padded batch of games of two and three turns, and the losses of it."""
    games = [prompt(tokenizer, instructions[:turns], ended=True) for turns in (2, 3)]
    longest = games[-1][0].shape[1]
    padded = [
        torch.cat([torch.nn.functional.pad(x, (0, longest - x.shape[1])) for x in values])
        for values in zip(*games, strict=True)
    ]
    ids, query, history, state = padded
    present = torch.arange(longest) < torch.tensor([[x[0].shape[1]] for x in games])
    target = torch.tensor([1, 2])
    arrays = {
        "input_ids": ids,
        "attention_mask": torch.where(query, -1, present.long()),
        "query_mask": query,
        "history_mask": history,
        "labels": torch.where(state, ids, -100),
        "turn_embeds": normal(random, 2, 3, _QUERIES, agent.output_resampler.output_dim),
        "target_turn": target,
    }
    losses = agent(
        ids, arrays["attention_mask"], arrays["labels"], arrays["turn_embeds"].clone(),
        embeds_gen_mask=torch.tensor([True, True]), embeds_cmp_mask=None, ids_gen_mask=query,
        ids_cmp_mask=history, gen_turn_id=target, face_emb=None,
    )  # fmt: skip
    return arrays | losses


def write(path: Path, arrays: dict[str, Any]) -> None:
    """Writes arrays and tensors to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **{name: np.asarray(value) for name, value in arrays.items()})
    print(f"{path}: {len(arrays)} arrays")


def link(target: Path, source: Path) -> None:
    """Makes a symbolic link, for checkpoints are large."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        target.symlink_to(source.resolve())


@torch.no_grad()
def main() -> None:
    """Parses the command line and writes the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="clone of the PyTorch release")
    parser.add_argument("out", type=Path, help="folder for `animegamer parity`")
    parser.add_argument("--vae", type=Path, help="3d-vae.pt")
    parser.add_argument("--decoder", type=Path, help="folder of the decoder (with a file `latest`)")
    parser.add_argument("--agent", type=Path, help="pytorch_model.bin of the language model")
    parser.add_argument("--mistral", type=Path, help="folder of the base model, for --agent")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer, for --agent")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs (default: 0)")
    options = parser.parse_args()
    if not (options.vae or options.decoder or options.agent):
        parser.error("nothing to record: give --vae, --decoder or --agent")
    if options.agent and not (options.mistral and options.tokenizer):
        parser.error("--agent needs --mistral and --tokenizer")
    import_release(options.checkout)
    out, random = options.out, np.random.default_rng(options.seed)
    if options.vae:
        link(out / "vae" / "3d-vae.pt", options.vae)
        write(out / "vae" / "vae.npz", record_vae(options.vae, random))
    if options.agent:
        tokenizers = importlib.import_module("transformers").LlamaTokenizer

        link(out / "mllm" / "pytorch_model.bin", options.agent)
        link(out / "mllm" / options.mistral.resolve().name, options.mistral)
        link(out / "tokenizer", options.tokenizer)
        tokenizer = tokenizers.from_pretrained(options.tokenizer)
        agent = load_agent(options.checkout, options.agent, options.mistral)
        lines = (options.checkout / "game_demo" / "demo.txt").read_text("utf-8").splitlines()
        instructions = [line.strip() for line in lines][:_TURNS]
        write(out / "mllm" / "rollout.npz", record_rollout(agent, tokenizer, instructions))
        losses = record_loss(agent, tokenizer, instructions, random)
        write(out / "mllm" / "training_loss.npz", losses)
    if options.decoder:
        for path in options.decoder.iterdir():
            if path.suffix != ".npz":
                link(out / "vdm" / path.name, path)
        found = record_decoder(options.checkout, options.decoder, random, options.seed)
        for name, arrays in found.items():
            write(out / "vdm" / f"{name}.npz", arrays)


if __name__ == "__main__":
    main()
