"""`animegamer serve`: its options, and the model and the games that it serves."""

import ipaddress
import os
import socket
from pathlib import Path
from typing import Annotated

import tyro

from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.configs import Dtype
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError, check_between
from animegamer_jax.game.saved.turns import History
from animegamer_jax.progress import print_status
from animegamer_jax.serve.guard.limits import Limits

_DEFAULT_MAX_STEPS = 100  # of a turn, if the model does not take more
_LIMITS = Limits()


def serve(
    *,
    model: str = "toy",
    host: str = "127.0.0.1",
    port: int = 7860,
    max_games: int = 64,
    games: Path = Path("out/serve"),
    steps: int | None = None,
    dtype: Dtype | None = None,
    history: History | None = None,
    auth: tuple[str, ...] = (),
    warm_up: bool = True,
    max_steps: int | None = None,
    first_picture: bool = True,
    client_games: int = 16,
    client_turns: int = 8,
    limits: Annotated[Limits, tyro.conf.arg(name="")] = _LIMITS,
    allowed_hosts: tuple[str, ...] = (),
    trusted_proxies: tuple[str, ...] = (),
    shutdown_seconds: int = 30,
) -> int:
    """Serve the game as a web page, with an API.

    A client is an account of --auth, or an address (for IPv6 a network of 64 bits).

    Args:
        model: Model folder, as `animegamer convert` writes it, or `toy` for the embedded model.
        host: Address to serve the page on; 0.0.0.0 for all addresses of this machine.
        port: Port of the page, 0 to 65535; 0 for any free port.
        max_games: Largest number of open games. A game that has been idle for half an hour is
            closed when another needs its place, and opened again when its player returns.
        games: Folder of all games, which are saved after every turn.
        steps: Denoising steps a turn of new games, 1 to 1000. Default: the model's own.
        dtype: Number format of the computation. Default: the model's own.
        history: Past shots as the model sees them: as it `predicted` them, or as they were `shown`:
            encoded from the first frame of each clip. Default: the model's own.
        auth: Accounts that may play, each as name:password. Default: everyone may play.
        warm_up: Compile the programs of all batch sizes before the first turn is played.
        max_steps: Most denoising steps of a turn, 1 to 1000. Default: 100, or --steps if that is
            more.
        first_picture: Picture of a turn before its clip is made, for pages and programs that follow
            it: the one that the model draws first, or a guess after half of the steps, which costs
            one frame's decoding a turn.
        client_games: Most open games of one client, whose least recently used game is closed to
            make room.
        client_turns: Most turns of one client that wait or are played.
        limits: Limits of a client, and of all of them together.
        allowed_hosts: Names under which the server may be asked for, besides --host and localhost;
            `*` for all. With --host 0.0.0.0 any address and the machine's own name are allowed.
            Default: none.
        trusted_proxies: Addresses or networks of reverse proxies, whose X-Forwarded-For names the
            client. Default: none, the header is ignored.
        shutdown_seconds: Time in seconds for turns that are being played when the server stops.
    """
    pairs = _read_auth(auth)
    for option, value, low, high in (
        ("--port", port, 0, 65535),
        ("--max-games", max_games, 1, 100_000),
        ("--steps", steps, 1, 1000),
        ("--max-steps", max_steps, 1, 1000),
        ("--client-games", client_games, 1, 100_000),
        ("--client-turns", client_turns, 1, 100_000),
        ("--client-requests", limits.client_requests, 1, 10_000_000),
        ("--client-connections", limits.client_connections, 1, 100_000),
        ("--client-upload-mb", limits.client_upload_mb, 0, 1_000_000),
        ("--uploads-mb", limits.uploads_mb, 1, 10_000_000),
        ("--uploads-minutes", limits.uploads_minutes, 1, 1_000_000),
        ("--shutdown-seconds", shutdown_seconds, 0, 3600),
    ):
        check_between(option, value, low, high)
    _check_proxies(trusted_proxies)
    folder = model_folder(model)
    port = _check_port(host, port)
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    keep_compiled_programs()

    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.game.openings import read_openings
    from animegamer_jax.game.player import Player
    from animegamer_jax.media.video import enlarged_size
    from animegamer_jax.serve.engine.engine import Engine, suitable_batches
    from animegamer_jax.serve.games.game_store import GameModel, GameStore, check_game
    from animegamer_jax.serve.guard.monitor import Monitor, show_log
    from animegamer_jax.serve.server import ServerOptions, run

    bundle = Bundle.open(folder)
    player = Player.from_bundle(bundle, steps=steps, dtype=dtype, history=history)
    mllm = player.networks.mllm.config
    game_model = GameModel(
        name=bundle.name,
        protocol=bundle.protocol.name,
        representation=(mllm.num_queries, mllm.representation_size),
        clip=(*enlarged_size(player.height, player.width), player.num_frames),
        history=player.protocol.history,
        first_latents=player.networks.first_dit.config.first_shape,
    )
    store = GameStore(games, model=game_model, max_games=max_games, client_games=client_games)
    monitor = Monitor()
    batch_sizes, workers = suitable_batches()
    engine = Engine(
        player,
        store,
        batch_sizes=batch_sizes,
        workers=workers,
        max_steps=max_steps or max(_DEFAULT_MAX_STEPS, player.steps),
        client_turns=client_turns,
        first_pictures=first_picture,
        on_end=monitor.count_turn,
    )
    show_log()
    options = ServerOptions(
        host=host,
        port=port,
        auth=tuple(pairs),
        limits=limits,
        allowed_hosts=allowed_hosts,
        trusted_proxies=trusted_proxies,
        shutdown_seconds=shutdown_seconds,
        warm_up=warm_up,
    )
    openings = read_openings(bundle.path)
    for game in openings.games.values():
        check_game(game, game_model)
    if bundle.vocabulary.characters and not openings.games:
        print_status(
            f"no prepared first shots in {bundle.path}: the first turn of a game is played when it "
            f"begins; make them with: animegamer openings --model {model}"
        )
    run(
        engine,
        bundle.vocabulary,
        monitor,
        options,
        name=bundle.name,
        steps=player.steps,
        openings=openings,
    )
    return 0


def _check_proxies(proxies: tuple[str, ...]) -> None:
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            raise UserError(
                f"--trusted-proxies: expected an address or a network such as 10.0.0.0/8, found "
                f"{proxy[:60]}"
            ) from error


def _read_auth(pairs: tuple[str, ...]) -> list[tuple[str, str]]:
    found = []
    for pair in pairs:
        name, colon, password = pair.partition(":")
        if not (name and colon and password):
            raise UserError("--auth: expected name:password, found something else")
        found.append((name, password))
    return found


def _check_port(host: str, port: int) -> int:
    """Returns a free port on the host: the given one, or any for 0.

    Raises:
        UserError: The port is taken or may not be used, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return probe.getsockname()[1]
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: cannot serve there: {error.strerror or error}: "
            "choose another --port, or an address of this machine"
        ) from error
