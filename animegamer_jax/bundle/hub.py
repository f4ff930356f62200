"""Downloads a model from the Hugging Face hub, or from a server like it (`HF_ENDPOINT`).

Only files with the names of a bundle in safetensors form are downloaded, so nothing that Python
would execute. They are kept in the cache of `huggingface_hub`, by revision. What the files hold is
checked when they are read (`bundle.py`), as with every model that others made.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

from animegamer_jax.configs import NetworkName
from animegamer_jax.errors import UserError, first_line
from animegamer_jax.progress import print_status

T = TypeVar("T")

PREFIX = "hub:"
_NETWORKS = get_args(NetworkName)
_ADDRESS = re.compile(r"hub:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_NAMES = re.compile(
    r"config\.json|words\.json|README\.md|(t5_)?tokenizer/[\w-][\w.-]*"
    rf"|({'|'.join(_NETWORKS)})/model(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?"
)
# The same, for the question whether all files are in the cache.
_PATTERNS = [
    *("config.json", "words.json", "README.md", "tokenizer/*", "t5_tokenizer/*"),
    *(f"{name}/model*.safetensors*" for name in _NETWORKS),
]


def fetch(
    address: str, *, cache: Path | None = None, offline: bool = False, revision: str | None = None
) -> Path:
    """Returns the local folder of a model on the hub, after downloading what is missing.

    Args:
        address: `hub:OWNER/NAME` or `hub:OWNER/NAME@REVISION`, a branch, a tag or a commit.
        cache: Folder for downloaded files; that of `huggingface_hub` if None.
        offline: Whether to use what was downloaded before, without asking the hub. The variable
            `HF_HUB_OFFLINE=1` does the same.
        revision: The revision, if the address has none; the main branch if None.

    Raises:
        UserError: The address is malformed, there is no such model or revision, the hub cannot be
            reached, or nothing was downloaded before and `offline` is set.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(
            f"{address}: expected hub:OWNER/NAME or hub:OWNER/NAME@REVISION, as the hub's page "
            "shows them"
        )
    import huggingface_hub as library

    repo, revision = match["repo"], match["revision"] or revision
    offline = offline or library.is_offline_mode()
    options: dict[str, Any] = {"cache_dir": cache, "local_files_only": offline}
    options["allow_patterns"] = _PATTERNS
    if not offline:
        info = ask(address, lambda: library.HfApi().model_info(repo, revision=revision))
        listed = [file.rfilename for file in info.siblings or ()]
        names = [name for name in listed if _NAMES.fullmatch(name)]
        if "config.json" not in names:
            raise UserError(
                f"{address}: not a model of animegamer_jax: expected config.json among its files"
            )
        print_status(f"{address}: revision {info.sha}")
        options["allow_patterns"] = names  # no name has a wildcard
    folder = ask(address, lambda: library.snapshot_download(repo, revision=revision, **options))
    return Path(str(folder))


def ask(address: str, request: Callable[[], T]) -> T:
    """Calls the hub, and turns its errors into one line.

    Raises:
        UserError: The hub refused the request or cannot be reached.
    """
    from huggingface_hub import errors

    try:
        return request()
    except errors.RevisionNotFoundError as error:
        reason, hint = "no such revision", "see the branches and tags on the hub's page"
        raise UserError(f"{address}: {reason}: {hint}") from error
    except errors.GatedRepoError as error:
        reason, hint = "access must be granted first", "accept its terms on the hub's page"
        raise UserError(f"{address}: {reason}: {hint}") from error
    except errors.RepositoryNotFoundError as error:
        reason = "no such model or dataset, or it is private"
        raise UserError(f"{address}: {reason}: check the name, or `hf auth login`") from error
    except errors.LocalEntryNotFoundError as error:
        reason, hint = "was not downloaded before", "try once without HF_HUB_OFFLINE"
        raise UserError(f"{address}: {reason}: {hint}") from error
    except Exception as error:  # of the HTTP library, whose name depends on the version
        reason = first_line(error) or type(error).__name__
        hint = "check the connection; HF_HUB_OFFLINE=1 uses what was downloaded before"
        raise UserError(f"{address}: the hub does not answer: {reason}: {hint}") from error
