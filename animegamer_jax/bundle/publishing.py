"""Writes a model as a folder for a hub, with its card, and uploads it.

The folder is a bundle whose weights are safetensors files (`safetensors_files.py`), so every
command reads it as it is. `animegamer publish` is the command, which also writes datasets.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from animegamer_jax.bundle.hub import ask
from animegamer_jax.bundle.networks import NETWORKS
from animegamer_jax.bundle.safetensors_files import write_tensors
from animegamer_jax.errors import UserError
from animegamer_jax.progress import print_status
from animegamer_jax.storage.paths import is_bucket

if TYPE_CHECKING:
    from animegamer_jax.bundle.bundle import Bundle

CARD = "README.md"


def save_model(bundle: "Bundle", folder: Path, *, licence: str, repo: str | None = None) -> None:
    """Writes a bundle with its weights as safetensors files, and a card.

    About 2 GB are in memory at a time. The folder is a bundle too.

    Raises:
        UserError: A part of the bundle is missing or damaged, or it is in a bucket.
        FileExistsError: The folder exists.
    """
    if is_bucket(bundle.path):
        raise UserError(f"{bundle.path}: copy the model to a local folder first")
    source = Path(bundle.path)
    folder.mkdir(parents=True)
    for name in ("config.json", "words.json", "tokenizer", "t5_tokenizer"):
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name)
        elif (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for name in filter(bundle.has, NETWORKS):
        print_status(f"{name}: writing")
        write_tensors(folder / name, bundle.read_in_order(name, sorted(bundle.leaves(name))))
    own = source / CARD
    text = own.read_text() if own.is_file() else ""
    (folder / CARD).write_text(model_card(bundle, licence=licence, repo=repo, text=text))


def model_card(bundle: "Bundle", *, licence: str, repo: str | None = None, text: str = "") -> str:
    """Returns a model's card: what it is, how to use it, sizes, and the bundle's own text."""
    protocol = bundle.protocol
    rows = []
    for name in filter(bundle.has, NETWORKS):
        leaves = bundle.leaves(name).values()
        weights, size = (sum(f(x) for x in leaves) for f in (lambda x: x.size, _num_bytes))
        formats = ", ".join(sorted({leaf.dtype.name for leaf in leaves}))
        rows.append(f"| {name} | {weights / 1e6:,.1f} M | {size / 1e6:,.1f} MB | {formats} |")
    stages = bundle.info.stages
    first = ""
    if protocol.picture_first:
        first = f" of a picture that comes first, {protocol.motion_guidance:g} of the clip's motion"
    lines = [
        *card_head(licence, tags=("animegamer", "jax", "video", "game"), pipeline="text-to-video"),
        f"# {bundle.name}",
        "",
        "A model for AnimeGamer ([arXiv 2504.01014](https://arxiv.org/abs/2504.01014)), in the "
        "format of animegamer_jax. Each turn it reads an instruction and the earlier turns, and "
        "makes a clip of what happens.",
        "",
        "```",
        f"animegamer play --model hub:{repo or 'OWNER/NAME'}",
        "```",
        "",
        f"Protocol `{protocol.name}`, {protocol.window} turns of context, "
        f"{protocol.denoising_steps} denoising steps, guidance {protocol.guidance_scale:g}{first}. "
        f"Written {bundle.info.date}. Training stages: "
        f"{', '.join(stages) if stages else 'not recorded' if stages is None else 'none'}.",
        "",
        "| network | weights | size | format |",
        "|---|---|---|---|",
        *rows,
        "",
        "The weights have checksums in `config.json`, which are compared when they are loaded. The "
        "model can show persons and events that do not exist; do not present its clips as real.",
    ]
    return "\n".join(lines) + "\n" + (f"\n{text}" if text else "")


def _num_bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def card_head(licence: str, *, tags: tuple[str, ...], pipeline: str | None = None) -> list[str]:
    """Returns the card's fields that the hub reads."""
    lines = ["---", f"license: {licence}", "library_name: animegamer_jax"]
    if pipeline:
        lines.append(f"pipeline_tag: {pipeline}")
    return [*lines, "tags:", *(f"- {tag}" for tag in tags), "---", ""]


def upload(
    folder: Path,
    repo: str,
    *,
    kind: Literal["model", "dataset"] = "model",
    revision: str | None = None,
    private: bool = True,
) -> str:
    """Uploads a folder to the hub as one commit, and returns the commit's address.

    Raises:
        UserError: The hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    api, address = HfApi(), f"--repo {repo}"
    ask(address, lambda: api.create_repo(repo, repo_type=kind, private=private, exist_ok=True))
    if revision is not None:
        ask(
            address,
            lambda: api.create_branch(repo, branch=revision, repo_type=kind, exist_ok=True),
        )
    commit = ask(
        address,
        lambda: api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            repo_type=kind,
            revision=revision,
            commit_message=f"Upload {folder.name} with animegamer publish",
        ),
    )
    return str(commit.commit_url)
