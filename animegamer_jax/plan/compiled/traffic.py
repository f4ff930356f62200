"""The bytes that an instruction of a compiled program reads and writes in HBM."""

from collections.abc import Iterable

from animegamer_jax.plan.compiled.hlo import Array, Computation, Instruction, Module

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all",
)  # fmt: skip
SLICES = ("dynamic-slice", "slice", "gather")


def num_bytes(arrays: Iterable[Array]) -> float:
    """Returns the bytes of all arrays, in any memory."""
    return sum((array.num_bytes for array in arrays), 0.0)


def moved_bytes(i: Instruction, inside: Computation, module: Module) -> float:
    """Returns the bytes read and written in HBM; of a sliced array only the slice."""
    called = i.called("calls") if i.opcode == "fusion" else None
    total = _written(i, inside, module)
    parameters = module.computations[called].parameters if called else []
    for number, name in enumerate(i.operands):
        operand = inside.instructions.get(name)
        if operand is None or len(operand.arrays) != 1 or not operand.array.in_hbm:
            continue
        size = operand.array.num_bytes
        if called:
            total += _read(module.computations[called], parameters[number], size, module)
        elif i.opcode in SLICES:
            total += min(size, num_bytes(i.arrays))
        elif i.opcode == "dynamic-update-slice" and number == 0:
            continue
        else:
            total += size
    return total


def _written(i: Instruction, inside: Computation, module: Module) -> float:
    stored = zip(_stored(i, inside, module), i.arrays, strict=True)
    return sum((size for size, array in stored if array.in_hbm), 0.0)


def _stored(i: Instruction, inside: Computation, module: Module) -> list[float]:
    """Returns the bytes stored for each array of a value, in any memory.

    Of an in-place update only the update; nothing for an operand that is passed through or for
    the result of a collective.
    """
    parts = [inside.instructions[name] for name in i.operands if name in inside.instructions]
    if i.opcode == "fusion" and (called := i.called("calls")):
        inner = module.computations[called]
        found = _stored(inner.root, inner, module)
    elif i.opcode == "tuple":
        found = [
            size
            for part in parts
            for size in ([0.0] if part.opcode == "parameter" else _stored(part, inside, module))
        ]
    elif i.opcode == "bitcast" and parts:
        found = _stored(parts[0], inside, module)
    elif i.opcode == "dynamic-update-slice":
        found = [num_bytes(parts[1].arrays)]
    elif i.opcode in COLLECTIVES:
        found = [0.0] * len(i.arrays)
    else:
        found = []
    if len(found) != len(i.arrays):
        return [array.num_bytes for array in i.arrays]
    return found


def _read(computation: Computation, parameter: Instruction, size: float, module: Module) -> float:
    total = 0.0
    for user in computation.users(parameter.name, through=("bitcast",)):
        if user.opcode in SLICES:
            total += num_bytes(user.arrays)
        elif user.opcode == "tuple" or user.opcode in COLLECTIVES:
            continue  # not copied; a collective's traffic is counted separately
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            continue
        elif user.opcode == "fusion" and (called := user.called("calls")):
            inner = module.computations[called]
            uses = [n for n, name in enumerate(user.operands) if name == parameter.name]
            total += sum(_read(inner, inner.parameters[n], size, module) for n in uses)
        else:
            return size
    return min(total, size)
