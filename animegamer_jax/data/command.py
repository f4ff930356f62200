"""`animegamer data features`: the networks' features of a game dataset."""

from typing import Annotated, Literal

import tyro

from animegamer_jax.distributed import HostOptions
from animegamer_jax.progress import print_line, show_progress


def features(
    *,
    model: str,
    data: str,
    out: str,
    frame: Literal["first", "random"] = "first",
    batch: int = 16,
    shard: int | None = None,
    size: Literal["toy", "full"] = "toy",
    host_options: Annotated[HostOptions, tyro.conf.arg(name="")],
) -> int:
    """Compute the networks' features of a game dataset: of its texts, frames and clips.

    After an interruption, run the same command again. Several hosts share the work.

    Args:
        model: Bundle with T5, CLIP and the VAE, or `toy` for the embedded model.
        data: Game dataset.
        out: Folder to write: a path that all hosts share, or gs://.
        frame: Frame of each clip that CLIP sees; the paper uses the first.
        batch: Number of turns that a host computes at a time, a multiple of its devices.
        shard: Number of turns in a file, which is also what an interruption loses at most. Default:
            256, up to 8,192 for large datasets.
        size: Size whose number of text tokens is used if the bundle has no shot encoder yet.
        host_options: Options for several hosts.
    """
    from animegamer_jax.distributed import check_agreement, only_run, raise_on_all_hosts

    host_options.join()
    import jax

    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.configs import SIZES
    from animegamer_jax.data.datasets import open_games
    from animegamer_jax.data.features import write_features

    with raise_on_all_hosts():
        bundle, games = Bundle.open(model), open_games(data)
        encoder = bundle.config.encoder or SIZES[size]().encoder
        assert encoder is not None  # each named size has one
    settings = {"model": model, "data": data, "out": out, "frame": frame, "shard": shard}
    check_agreement({**settings, "size": size})
    with only_run(out), show_progress() as progress:
        info = write_features(
            out,
            bundle=bundle,
            games=games,
            num_text_tokens=encoder.num_text_tokens,
            frame=frame,
            batch_size=batch,
            shard_size=shard,
            on_progress=progress,
        )
    if jax.process_index() == 0:
        counts = ", ".join(f"{split} {count}" for split, count in info.splits.items())
        print_line(f"{out}: features of {sum(info.splits.values())} turns ({counts})")
    return 0
