"""Compiler flags of the processes that tests start."""

import os


def xla_flags(devices: int = 1) -> str:
    """The flags of `conftest`, which compile quickly, for a process with this many devices."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"])
