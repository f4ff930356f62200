"""Several hosts as one machine: joining them, what stops them all, whether they mean one run."""

import contextlib
import glob
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from animegamer_jax.errors import UserError
from animegamer_jax.storage.serialization import flattened

_CLUSTERS = ("JAX_COORDINATOR_ADDRESS", "SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri")
_CHIPS = ("/dev/accel*", "/dev/vfio/[0-9]*")
_HELLO, _GO = "animegamer-host", "animegamer-go"
_HELLO_SECONDS = 2.0  # for a caller's first line: it may be no host of ours
_TEXT_BYTES = 2048  # of a problem that is told to the other hosts


def on_cluster() -> bool:
    """Whether JAX may find the other hosts by itself: TPU machines (VM, GKE), Slurm, Open MPI."""
    return any(map(os.environ.get, _CLUSTERS)) or any(map(glob.glob, _CHIPS))


def join_hosts(
    *, coordinator: str | None, hosts: int | None, host: int | None, seconds: int
) -> None:
    """Makes this process one of several, before JAX looks for devices.

    On TPU machines and under Slurm by itself; elsewhere where a coordinator is given. A machine on
    which JAX finds no other host goes on alone.

    Args:
        coordinator: HOST:PORT of host 0.
        hosts: how many there are.
        host: the number of this one.
        seconds: to wait for the others.

    Raises:
        UserError: the three do not come together, or not all hosts come in time.
    """
    if jax.distributed.is_initialized():
        return
    if coordinator is None and hosts is None and host is None:
        if on_cluster():
            _say(f"waiting for the other hosts, where JAX finds some, up to {seconds} s")
            _initialize(seconds=seconds)
        return
    if coordinator is None or hosts is None or host is None:
        raise UserError("--coordinator, --hosts and --host: expected all of them or none")
    name, port = _address(coordinator)
    if not 0 <= host < hosts:
        raise UserError(f"--host {host}: expected 0 to {hosts - 1}, for --hosts {hosts}")
    # JAX's own service and clients end the process, where a host does not come.
    if hosts > 1:
        _say(f"waiting for {hosts} hosts at {coordinator}, up to {seconds} s")
    if host == 0:
        _receive(coordinator, port, hosts=hosts, seconds=seconds)
    else:
        _call(coordinator, (name, port), hosts=hosts, host=host, seconds=seconds)
    _initialize(
        coordinator_address=coordinator, num_processes=hosts, process_id=host, seconds=seconds
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _address(coordinator: str) -> tuple[str, int]:
    name, _, port = coordinator.rpartition(":")
    if not name or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
        raise UserError(f"--coordinator {coordinator}: expected HOST:PORT")
    return name.strip("[]"), int(port)


def _initialize(*, seconds: int, **told: Any) -> None:
    try:
        jax.distributed.initialize(**told, initialization_timeout=seconds)
    except (RuntimeError, ValueError, OSError) as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if not told and "coordinator_address" in problem:  # JAX's word for: no other hosts
            return
        raise UserError(
            f"the hosts did not come together: {problem}: start the same command on every host, "
            "or give --coordinator, --hosts and --host"
        ) from error


def _receive(coordinator: str, port: int, *, hosts: int, seconds: int) -> None:
    """On host 0: waits until every other host has called, and lets all go on together.

    Raises:
        UserError: one does not in time, or was started otherwise; those that called are told.
    """
    end = time.monotonic() + seconds
    calls: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as opened:
        try:
            server = opened.enter_context(_listen(port))
        except OSError as error:
            raise UserError(
                f"--coordinator {coordinator}: this host cannot listen there "
                f"({error.strerror or error}): give another port on every host"
            ) from error
        problem = None
        while problem is None:
            calls = {number: call for number, call in calls.items() if not _hung_up(call)}
            if len(calls) == hosts - 1:
                break
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                call = opened.enter_context(server.accept()[0])
            except TimeoutError:
                missing = ", ".join(str(i) for i in range(1, hosts) if i not in calls)
                problem = (
                    f"--coordinator {coordinator}: {len(calls) + 1} of {hosts} hosts came in "
                    f"{seconds} s, host {missing} did not: start the same command on every host"
                )
                break
            hello = re.fullmatch(rf"{_HELLO} (\d+) (\d+)", _read_line(call, _HELLO_SECONDS))
            if hello is None:
                continue
            number, count = map(int, hello.groups())
            if count != hosts:
                problem = f"--hosts: host {number} was told {count}, host 0 {hosts}"
            elif number in calls:
                problem = f"--host {number}: two hosts were told so"
            if problem is not None:
                number = -1  # beside the one of this number: both are told
            calls[number] = call
        for call in calls.values():
            with contextlib.suppress(OSError):
                call.sendall(f"{problem or _GO}\n".encode())
    if problem is not None:
        raise UserError(problem)


def _call(
    coordinator: str, address: tuple[str, int], *, hosts: int, host: int, seconds: int
) -> None:
    """On another host than 0: calls host 0, and waits for its word that all are there.

    Raises:
        UserError: there is no answer in time, or host 0's word is another one.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            left = max(1.0, end - time.monotonic())
            with socket.create_connection(address, timeout=left) as call:
                call.sendall(f"{_HELLO} {host} {hosts}\n".encode())
                answer = _read_line(call, seconds + _HELLO_SECONDS)
            if answer == _GO:
                return
            if answer.startswith("--"):
                raise UserError(f"host 0: {answer}")
            told = "another program answers there" if answer else "no word from it"
        except OSError as error:
            told = error.strerror or str(error)
        if time.monotonic() >= end:
            raise UserError(
                f"--coordinator {coordinator}: no answer in {seconds} s ({told}): start the same "
                "command on host 0 too, and check address and port"
            )
        time.sleep(0.2)


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _read_line(call: socket.socket, seconds: float) -> str:
    """A line without its end; empty where the other side hangs up or is silent."""
    call.settimeout(seconds)
    try:
        with call.makefile(errors="replace") as file:
            return file.readline(_TEXT_BYTES).strip()
    except OSError:
        return ""


def _hung_up(call: socket.socket) -> bool:
    call.setblocking(False)
    try:
        return not call.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A block after which all hosts go on, or none: a mistake that one finds stops them all.

    Nothing in the block may wait for other hosts.

    Raises:
        UserError: the block's own; on the other hosts the same, with the host's number.
    """
    problem: UserError | None = None
    try:
        yield
    except UserError as error:
        problem = error
    if jax.process_count() > 1:
        text = np.zeros(_TEXT_BYTES, np.uint8)
        told = b"" if problem is None else (str(problem).encode() or b"?")[:_TEXT_BYTES]
        text[: len(told)] = np.frombuffer(told, np.uint8)
        everywhere = multihost_utils.process_allgather(text)
        for host, row in enumerate(everywhere):
            found = bytes(row).rstrip(b"\0").decode(errors="ignore")
            if found and problem is None:
                raise UserError(f"host {host}: {found}")
    if problem is not None:
        raise problem


def check_agreement(about: Mapping[str, Any]) -> None:
    """Whether all hosts were started alike.

    Args:
        about: what the run is, as JSON.

    Raises:
        UserError: names the first field in which a host differs from host 0.
    """
    if jax.process_count() == 1:
        return
    fields = sorted((name, json.dumps(value)) for name, value in flattened(about))
    names, digests = _digest(json.dumps([n for n, _ in fields])), [_digest(v) for _, v in fields]
    everywhere = multihost_utils.process_allgather(np.array([names, len(digests)], np.uint32))
    if (everywhere != everywhere[0]).any():
        raise UserError(_differs(everywhere, "the options"))
    found = multihost_utils.process_allgather(np.array(digests, np.uint32))
    for number, (name, value) in enumerate(fields):
        if (found[:, number] != found[0, number]).any():
            raise UserError(_differs(found[:, number : number + 1], f"{name} (here {value})"))


def _differs(everywhere: np.ndarray, what: str) -> str:
    others = [i for i, row in enumerate(everywhere) if (row != everywhere[0]).any()]
    hosts = ", ".join(map(str, others))
    return f"host {hosts}: another value than host 0 of {what}: start all hosts alike"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
