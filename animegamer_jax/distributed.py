"""Several hosts that run the same command: joining them, errors on all of them, agreement.

JAX is imported inside the functions, because commands need the options long before JAX.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from animegamer_jax.devices import has_tpu
from animegamer_jax.errors import UserError, first_line
from animegamer_jax.progress import print_status
from animegamer_jax.storage.locks import only_writer
from animegamer_jax.storage.serialization import flattened

_CLUSTERS = ("JAX_COORDINATOR_ADDRESS", "SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri")
_JAX_MARGIN = 60  # seconds by which JAX's own time-out comes after ours
_TEXT_BYTES = 2048  # of an error message that is sent to the other hosts


def on_cluster() -> bool:
    """Returns whether JAX may find the hosts itself: TPU machines (VM, GKE), Slurm, Open MPI."""
    return any(map(os.environ.get, _CLUSTERS)) or has_tpu()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options of a command that several hosts run together.

    Attributes:
        coordinator: Address HOST:PORT of host 0. Leave it out on TPU machines, under Slurm and
            under Open MPI, where JAX finds the hosts by itself.
        hosts: Number of hosts; needed with --coordinator, and only then.
        host: Index of this host, counted from 0; needed with --coordinator, and only then.
        connect_seconds: Seconds to wait for all hosts to join.
    """

    coordinator: str | None = None
    hosts: int | None = None
    host: int | None = None
    connect_seconds: int = 300

    def join(self) -> None:
        """Joins the other hosts; call it before JAX looks for devices.

        A machine of a cluster on which JAX finds no other host continues alone. If not all hosts
        join in time, the process ends with status 2 and one line.

        Raises:
            UserError: The options contradict each other, or this host cannot join.
        """
        import jax

        if jax.distributed.is_initialized():
            return
        if self.coordinator is None and self.hosts is None and self.host is None:
            if on_cluster():
                print_status(
                    f"waiting up to {self.connect_seconds} s for other hosts, if JAX finds any"
                )
                self._initialize()
            return
        if self.coordinator is None or self.hosts is None or self.host is None:
            raise UserError("--coordinator, --hosts and --host: expected all of them or none")
        name, _, port = self.coordinator.rpartition(":")
        if not name or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
            raise UserError(f"--coordinator {self.coordinator}: expected HOST:PORT")
        if not 0 <= self.host < self.hosts:
            raise UserError(
                f"--host {self.host}: expected 0 to {self.hosts - 1}, for --hosts {self.hosts}"
            )
        if self.host == 0:  # JAX may crash if it cannot listen
            try:
                socket.create_server(("", int(port))).close()
            except OSError as error:
                raise UserError(
                    f"--coordinator {self.coordinator}: this host cannot listen there "
                    f"({error.strerror or error}): choose another port on every host"
                ) from error
        if self.hosts > 1:
            print_status(
                f"waiting up to {self.connect_seconds} s for {self.hosts} hosts at "
                f"{self.coordinator}"
            )
        self._initialize(
            coordinator_address=self.coordinator, num_processes=self.hosts, process_id=self.host
        )
        check_agreement({"hosts": self.hosts})

    def _initialize(self, **arguments: Any) -> None:
        import jax

        # JAX ends the process with a stack trace if a host is missing, and does not react to Ctrl-C
        # while it waits: so a timer ends the process first, and Ctrl-C gets its default action.
        timer = threading.Timer(self.connect_seconds, self._give_up)
        timer.daemon = True
        timer.start()
        interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            jax.distributed.initialize(
                **arguments, initialization_timeout=self.connect_seconds + _JAX_MARGIN
            )
        except (RuntimeError, ValueError, OSError) as error:
            reason = first_line(error, most=200)
            if not arguments and "coordinator_address" in reason:  # JAX has found no other host
                return
            raise UserError(f"the hosts cannot join: {reason}") from error
        finally:
            timer.cancel()
            signal.signal(signal.SIGINT, interrupt)

    def _give_up(self) -> None:
        who = "all hosts" if self.hosts is None else f"all {self.hosts} hosts"
        where, hint = "", ""
        if self.coordinator is not None:
            where = f" at {self.coordinator}"
            hint = ", each with its own --host, and check that host 0's port can be reached"
        print_status(
            f"not {who} joined{where} within {self.connect_seconds} s: start the same command on "
            f"every host{hint}"
        )
        os._exit(2)  # an exit by exception would wait for JAX's client


@contextlib.contextmanager
def raise_on_all_hosts() -> Iterator[None]:
    """Raises UserError on every host if any host raises it in the block.

    All hosts must reach the block, and nothing in it may wait for other hosts.

    Raises:
        UserError: The block's own error, or another host's with that host's index.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    own: UserError | None = None
    try:
        yield
    except UserError as error:
        own = error
    if jax.process_count() > 1:
        text = np.zeros(_TEXT_BYTES, np.uint8)
        message = b"" if own is None else (str(own).encode() or b"?")[:_TEXT_BYTES]
        text[: len(message)] = np.frombuffer(message, np.uint8)
        for host, row in enumerate(multihost_utils.process_allgather(text)):
            found = bytes(row).rstrip(b"\0").decode(errors="ignore")
            if found and own is None:
                raise UserError(f"host {host}: {found}")
    if own is not None:
        raise own


@contextlib.contextmanager
def only_run(path: epath.PathLike) -> Iterator[None]:
    """Keeps out other runs that write to a folder, as `only_writer` does for one host.

    All hosts of a run must reach the block; host 0 holds the lock for them.

    Raises:
        UserError: On every host, another process is writing there.
    """
    import jax

    with contextlib.ExitStack() as stack:
        with raise_on_all_hosts():
            if jax.process_index() == 0:
                stack.enter_context(only_writer(path))
        yield


def check_agreement(settings: Mapping[str, Any]) -> None:
    """Checks that all hosts were started with the same settings, given as JSON.

    Raises:
        UserError: Names the first field in which a host differs from host 0.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return
    fields = sorted((name, json.dumps(value)) for name, value in flattened(settings))
    names, digests = _digest(json.dumps([n for n, _ in fields])), [_digest(v) for _, v in fields]
    everywhere = multihost_utils.process_allgather(np.array([names, len(digests)], np.uint32))
    if (everywhere != everywhere[0]).any():
        raise UserError(_difference(everywhere, "the options"))
    found = multihost_utils.process_allgather(np.array(digests, np.uint32))
    for number, (name, value) in enumerate(fields):
        if (found[:, number] != found[0, number]).any():
            raise UserError(_difference(found[:, number : number + 1], f"{name} (here {value})"))


def _difference(everywhere: Any, field: str) -> str:
    differing = (i for i, row in enumerate(everywhere) if (row != everywhere[0]).any())
    hosts = ", ".join(map(str, differing))
    return (
        f"host {hosts} and host 0 differ in {field}: start the same command on all hosts, with the "
        "same options"
    )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
