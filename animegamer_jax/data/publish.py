"""`animegamer publish`: a model or a dataset as a folder for the hub, with its card, and upload.

A dataset's folder is the dataset, with a card. A model's: see `bundle/publishing.py`.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from animegamer_jax.bundle.publishing import CARD, card_head, save_model, upload
from animegamer_jax.errors import UserError


def publish(
    *,
    model: str | None = None,
    data: Path | None = None,
    licence: str,
    out: Path | None = None,
    repo: str | None = None,
    revision: str | None = None,
    public: bool = False,
) -> int:
    """Write a model or a dataset as a folder for the Hugging Face hub, and upload it if asked.

    Args:
        model: Model folder, or `toy`. Default: none, a dataset is published.
        data: Folder of a game dataset or a feature dataset. Default: none, a model is published.
        licence: Licence for the card: the hub's name of one, such as `apache-2.0`, or `other`. A
            model made from released weights keeps their licence.
        out: Folder to write; it must not exist. Default: a temporary one, for --repo.
        repo: Name on the hub, OWNER/NAME, to upload to. Needs `hf auth login`. Default: no upload,
            only the folder is written.
        revision: Branch on the hub, made if it is missing. Default: main.
        public: Make a new repository public instead of private.

    Raises:
        UserError: Not one of --model and --data is given, neither of --out and --repo is, there is
            no such thing, or the hub refuses.
    """
    if (model is None) == (data is None):
        raise UserError("expected --model or --data, and not both")
    if out is None and repo is None:
        raise UserError("expected --out, a folder to write, or --repo, a name to upload to")
    with _folder(out) as folder:
        if model is not None:
            from animegamer_jax.bundle.bundle import Bundle

            save_model(Bundle.open(model), folder, licence=licence, repo=repo)
        elif data is not None:
            save_dataset(data, folder, licence=licence)
        if out is not None:
            print(folder)
        if repo is not None:
            kind = "dataset" if model is None else "model"
            print(upload(folder, repo, kind=kind, revision=revision, private=not public))
    return 0


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        if out.exists():
            raise UserError(f"--out {out}: already there: delete it or choose another folder")
        yield out
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary) / "content"


def save_dataset(data: Path, folder: Path, *, licence: str) -> None:
    """Copies a dataset and writes its card.

    Raises:
        UserError: There is no complete dataset.
        FileExistsError: The folder exists.
    """
    card = dataset_card(data, licence=licence)
    shutil.copytree(data, folder)
    own = folder / CARD
    text = own.read_text() if own.is_file() else ""
    own.write_text(card + (f"\n{text}" if text else ""))


def dataset_card(data: Path, *, licence: str) -> str:
    """Returns a dataset's card: its kind, splits and records, and what its owner must state.

    Raises:
        UserError: There is no complete dataset.
    """
    from animegamer_jax.data.datasets import read_info

    info = read_info(data)
    lines = [
        *card_head(licence, tags=("animegamer", "video", "game")),
        f"# {data.name}",
        "",
        f"A dataset of {info.kind} for animegamer_jax, as TFDS datasets of ArrayRecord files "
        "(`docs/data.md` there). A record is a turn of a game.",
        "",
        "| split | records |",
        "|---|---|",
        *(f"| {split} | {count:,} |" for split, count in info.splits.items()),
        "",
        f"Clips of {info.num_frames} frames of {info.height} x {info.width}, {info.fps} a second. "
        f"Made by `{info.made_by}`.",
        "",
        "Whoever publishes this states here: where the films come from, who holds their rights, "
        "and whether persons can be recognised.",
    ]
    return "\n".join(lines) + "\n"
