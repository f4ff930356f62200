"""What to plan, and estimates of it that nothing compiled."""

import dataclasses
import math

from animegamer_jax.plan.compiled.estimate import Estimate, Memory, Seconds
from animegamer_jax.plan.configurations import Configuration, StageName, make_configuration
from animegamer_jax.plan.topology import parse_topology


def configure(stage: StageName, topology: str, **given) -> Configuration:
    return make_configuration(stage, parse_topology(topology), **given)


def axes(**sizes: int) -> dict[str, int]:
    return {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes


def estimate_of(case: Configuration, topology: str, **changes) -> Estimate:
    """Of a program that takes 2 s and does its batch or its games in them."""
    made = Estimate(
        program="a program",
        topology=topology,
        plan=case.layout,
        mesh=case.mesh,
        num_chips=math.prod(case.mesh.values()),
        memory=Memory(arguments=1.0, temporaries=2.0, peak=3.0, chip=16.9),
        seconds=Seconds(
            matmuls=1.0,
            other=0.5,
            kernels=0.25,
            collectives=0.25,
            collectives_over_one_link=0.5,
        ),
        flops=1e12,
        gigabytes=10.0,
        collectives={"all-gather of 4": 2.0},
        gigabytes_between_slices=0.0,
        samples=case.batch_size or case.games,
        unit="turns" if case.batch_size is None else "clips",
        sample_flops=None,
        sample_tokens=None,
        peak_share=0.25,
        unknown_loops=0,
        unknown_instructions=0.0,
        unknown_kernels={},
    )
    return dataclasses.replace(made, **changes)
