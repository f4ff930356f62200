"""`animegamer data features`: the networks' features of a game dataset."""

from typing import Literal

from animegamer_jax.progress import show_progress


def features(
    *,
    model: str,
    data: str,
    out: str,
    frame: Literal["first", "random"] = "first",
    batch: int = 16,
    shard: int = 256,
    size: Literal["toy", "full"] = "toy",
    coordinator: str | None = None,
    hosts: int | None = None,
    host: int | None = None,
    connect_seconds: int = 300,
) -> int:
    """Compute the networks' features of a game dataset: of its texts, frames and clips.

    After an interruption, run the same command again. Several hosts share the work.

    Args:
        model: Bundle with T5, CLIP and the VAE.
        data: Game dataset.
        out: Folder to write: a path that all hosts share, or gs://.
        frame: Frame of each clip that CLIP sees; the paper uses the first.
        batch: Number of turns that a host computes at a time, a multiple of its devices.
        shard: Number of turns in a file, which is also what an interruption loses at most.
        size: Size whose number of text tokens is used if the bundle has no shot encoder yet.
        coordinator: HOST:PORT of host 0, where JAX does not find the hosts by itself (it does on
            TPU machines and under Slurm).
        hosts: How many there are, with --coordinator.
        host: The number of this one, with --coordinator.
        connect_seconds: To wait for the other hosts.
    """
    from animegamer_jax.distributed import (
        check_agreement,
        join_hosts,
        together,
    )

    join_hosts(coordinator=coordinator, hosts=hosts, host=host, seconds=connect_seconds)
    import jax

    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.configs import SIZES
    from animegamer_jax.data.datasets import open_games
    from animegamer_jax.data.features import write_features

    with together():
        bundle, games = Bundle.open(model), open_games(data)
        encoder = bundle.config.encoder or SIZES[size]().encoder
        assert encoder is not None  # each named size has one
    about = {"model": model, "data": data, "out": out, "frame": frame, "shard": shard}
    check_agreement({**about, "size": size})
    with show_progress() as progress:
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
        print(f"{out}: features of {sum(info.splits.values())} turns ({counts})")
    return 0
