"""Tables from PyTorch tensors to parameters, and the functions that apply them in both directions.

PyTorch names appear in these tables only. First `find_problems` compares names and shapes, and
lists every problem at once; then `convert` reads one tensor at a time. `export` is the inverse of
`convert`, `load` fills a module.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from animegamer_jax.bundle.bundle import flat_params
from animegamer_jax.errors import UserError

if TYPE_CHECKING:
    from animegamer_jax.convert.sources import Source

Array = np.ndarray
Shapes = Mapping[str, tuple[int, ...]]
Abstract = Mapping[str, jax.ShapeDtypeStruct]  # dotted path of a parameter -> shape and dtype


@dataclasses.dataclass(frozen=True)
class Transform:
    """Turns one source tensor into (its slice of) a parameter, and back, bit for bit."""

    forward: Callable[[Array], Array]
    inverse: Callable[[Array], Array]


IDENTITY = Transform(lambda x: x, lambda x: x)
TRANSPOSE = Transform(np.transpose, np.transpose)  # Linear [out, in] -> [in, out]
# [out, in, h, w] -> [h, w, in, out], and with time
CONV2D = Transform(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
CONV3D = Transform(lambda x: x.transpose(2, 3, 4, 1, 0), lambda x: x.transpose(4, 3, 0, 1, 2))
QKV = Transform(
    lambda x: x.reshape(3, x.shape[0] // 3, x.shape[1]).transpose(0, 2, 1),
    lambda x: x.transpose(0, 2, 1).reshape(3 * x.shape[2], x.shape[1]),
)  # fused projection [3 out, in] -> [3, in, out]
QKV_BIAS = Transform(lambda x: x.reshape(3, x.shape[0] // 3), np.ravel)


@dataclasses.dataclass(frozen=True)
class Rule:
    """`source` in the PyTorch checkpoint becomes `target`, a dotted path of the module.

    Each `{...}` in `source` is expanded: `{layer}` over the parameter's leading axis and, after it,
    `{part}` over the next; the transformed tensors are stacked there. With `target` None, the
    tensor may exist and is not used (`*` at the end of `source` stands for the rest of the name);
    `copy_of` then names the source whose value an export writes in its place.
    """

    source: str
    target: str | None
    transform: Transform = IDENTITY
    copy_of: str | None = None


Index = tuple[int, ...]

_PLACEHOLDERS = ("layer", "part")  # in the order of the axes that they stack on
_BLOCK = 1 << 22  # elements tested for infinities at a time


def _placeholders(pattern: str) -> tuple[str, ...]:
    found = set(re.findall(r"{(\w*)}", pattern))
    if unknown := found - set(_PLACEHOLDERS):
        raise ValueError(f"rule {pattern!r}: {sorted(unknown)} is none of {_PLACEHOLDERS}")
    return tuple(name for name in _PLACEHOLDERS if name in found)


def _name(pattern: str, index: Index) -> str:
    for key, i in zip(_placeholders(pattern), index, strict=True):
        pattern = pattern.replace(f"{{{key}}}", str(i))
    return pattern


def _expand(rule: Rule, shape: tuple[int, ...]) -> dict[Index, str]:
    """Returns the sources of a rule by their index in a parameter of `shape`."""
    lead = shape[: len(_placeholders(rule.source))]
    indices = itertools.product(*(range(size) for size in lead))
    return {index: _name(rule.source, index) for index in indices}


def _torch_shape(rule: Rule, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of one source tensor of a rule whose parameter has `shape`."""
    piece = shape[len(_placeholders(rule.source)) :]
    return rule.transform.inverse(np.broadcast_to(np.int8(0), piece)).shape


def _used(rules: Sequence[Rule], abstract: Abstract) -> Iterator[tuple[str, Rule]]:
    """Yields the rules that fill a parameter of this module, with the parameter's path."""
    for rule in rules:
        if rule.target is not None and rule.target in abstract:
            yield rule.target, rule


def _copies(rules: Sequence[Rule], rule: Rule, index: Index) -> list[str]:
    return [
        _name(copy.source, index)
        for copy in rules
        if copy.target is None and copy.copy_of == rule.source
    ]


def _dims(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


@dataclasses.dataclass
class _Findings:
    """Problems of a file, and the tensors that are read from it."""

    shapes: Shapes
    prefix: str
    problems: list[str] = dataclasses.field(default_factory=list)
    # The parameter that reads each tensor.
    readers: dict[str, str] = dataclasses.field(default_factory=dict)

    def read(self, name: str, reader: str, expected: tuple[int, ...]) -> None:
        found = self.shapes.get(name)
        full = self.prefix + name
        if name in self.readers:
            self.problems.append(f"read twice: {full} for {self.readers[name]} and for {reader}")
        elif found is None:
            self.problems.append(f"missing: {full} {_dims(expected)}, for {reader}")
        elif tuple(found) != tuple(expected):
            self.problems.append(
                f"wrong shape: {full}: expected {_dims(expected)}, found {_dims(found)}"
            )
        self.readers[name] = reader

    def allow(self, rule: Rule) -> None:
        """Allows a tensor that is known and not used."""
        if rule.source.endswith("*"):
            prefix = rule.source[:-1]
            names = [name for name in self.shapes if name.startswith(prefix)]
        else:
            pattern = re.compile(re.sub(r"\\{\w+\\}", r"\\d+", re.escape(rule.source)))
            names = [name for name in self.shapes if pattern.fullmatch(name)]
        self.readers.update(dict.fromkeys(names, "nothing"))


def find_problems(
    parts: Sequence[tuple[Sequence[Rule], Abstract]], shapes: Shapes, *, prefix: str = ""
) -> list[str]:
    """Compares names and shapes with all the tables that read them.

    Args:
        parts: Table and parameters to fill, for each network in the file.
        shapes: Shapes of the tensors, in PyTorch layout.
        prefix: Start of the tensors' names in the file, for the messages.

    Returns:
        A line for each tensor that is missing, unused, read twice or of another shape, and for
        each parameter that is never filled or filled twice.
    """
    seen = _Findings(shapes, prefix)
    for rules, abstract in parts:
        filled: dict[str, str] = {}
        for rule in rules:
            if rule.target is None:
                seen.allow(rule)
                continue
            if rule.target not in abstract:
                seen.problems.append(f"no such parameter: {rule.target}, from {rule.source}")
                continue
            if rule.target in filled:
                first = filled[rule.target]
                seen.problems.append(
                    f"filled twice: {rule.target}, from {first} and from {rule.source}"
                )
                continue
            filled[rule.target] = rule.source
            shape = abstract[rule.target].shape
            expected = _torch_shape(rule, shape)
            for name in _expand(rule, shape).values():
                seen.read(name, rule.target, expected)
        seen.problems += [f"never filled: {path}" for path in abstract if path not in filled]
    seen.problems += [
        f"unused: {prefix}{name} {_dims(shape)}"
        for name, shape in shapes.items()
        if name not in seen.readers
    ]
    return seen.problems


def raise_problems(problems: Mapping[str, Sequence[str]]) -> None:
    """Raises one `UserError` that lists the problems of all files, if there are any."""
    blocks = []
    for file, found in problems.items():
        if found:
            noun = "problem" if len(found) == 1 else "problems"
            lines = "".join(f"\n  {problem}" for problem in found)
            blocks.append(f"{file}: {len(found)} {noun}, nothing is converted{lines}")
    if blocks:
        raise UserError("\n".join(blocks))


def common_dtype(dtypes: Sequence[np.dtype]) -> np.dtype:
    """Returns the narrowest format that holds all of `dtypes`."""
    try:
        return np.result_type(*dtypes)
    except TypeError:  # bfloat16 and float16 have only a wider common format
        return np.dtype(np.float32)


def _count_non_finite(array: Array) -> int:
    flat = array.reshape(-1)
    blocks = (flat[i : i + _BLOCK] for i in range(0, flat.size, _BLOCK))
    # numpy has no bfloat16, and ml_dtypes' own test is slow.
    return sum(
        int(np.count_nonzero(~np.isfinite(b.astype(np.float32) if b.dtype.kind == "V" else b)))
        for b in blocks
    )


def convert(
    rules: Sequence[Rule],
    source: "Source",
    abstract: Abstract,
    *,
    problems: list[str] | None = None,
) -> Iterator[tuple[str, Array]]:
    """Converts the tensors of a checked file, one parameter and one tensor at a time.

    A parameter keeps its tensors' number format. Tensors with infinities or NaNs are added to
    `problems`, which the caller raises after all its files.

    Yields:
        The parameter's dotted path and its value.

    Raises:
        UserError: After the last parameter, if `problems` is None and tensors were not finite.
    """
    found: list[str] = [] if problems is None else problems
    for path, rule in _used(rules, abstract):
        names = _expand(rule, abstract[path].shape)
        dtypes = [source.tensors[name].dtype for name in names.values()]
        dtype = common_dtype(dtypes or [abstract[path].dtype])  # a stack of no layers has none
        stacked = bool(_placeholders(rule.source))
        leaf = np.empty(abstract[path].shape if stacked else (), dtype)
        for index, name in names.items():
            tensor = source.read(name)
            if count := _count_non_finite(tensor):
                found.append(f"not finite: {source.prefix}{name} ({count} of {tensor.size} values)")
            if not stacked:
                value = rule.transform.forward(tensor).astype(dtype, copy=False)
                # Scalars are 1-D there.
                leaf = np.ascontiguousarray(value).reshape(abstract[path].shape)
            else:
                leaf[index] = rule.transform.forward(tensor)
            del tensor
        yield path, leaf
        del leaf
    if problems is None:
        raise_problems({source.label: found})


def export_shapes(
    rules: Sequence[Rule], abstract: Abstract
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Returns the shape and format of every tensor that `export` makes, copies included."""
    out = {}
    for path, rule in _used(rules, abstract):
        entry = (_torch_shape(rule, abstract[path].shape), np.dtype(abstract[path].dtype))
        for index, name in _expand(rule, abstract[path].shape).items():
            out[name] = entry
            out.update(dict.fromkeys(_copies(rules, rule, index), entry))
    return out


def export(
    rules: Sequence[Rule], read_leaf: Callable[[str], Array], abstract: Abstract
) -> Iterator[tuple[str, Array]]:
    """Converts parameters back to tensors in PyTorch layout, one parameter at a time.

    Args:
        rules: The table.
        read_leaf: Returns a parameter's value, by its dotted path.
        abstract: Shapes of the parameters.

    Yields:
        The tensor's name and value (a view of the parameter where the layouts agree).
    """
    for path, rule in _used(rules, abstract):
        leaf = read_leaf(path)
        for index, name in _expand(rule, abstract[path].shape).items():
            tensor = rule.transform.inverse(leaf[index])
            yield name, tensor
            for copy in _copies(rules, rule, index):
                yield copy, tensor
            del tensor  # a view would keep the whole parameter while the next one is read
        del leaf


def load(
    rules: Sequence[Rule], source: "Source", module: nnx.Module, *, dtype: str | None = "float32"
) -> None:
    """Fills a module from one file, in `dtype` (None: the formats of the file).

    Raises:
        UserError: The file has problems (`find_problems`), or tensors are not finite.
    """
    state = nnx.state(module, nnx.Param)
    variables = flat_params(state)
    abstract = {
        path: jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        for path, variable in variables.items()
    }
    problems = find_problems([(rules, abstract)], source.shapes, prefix=source.prefix)
    raise_problems({source.label: problems})
    for path, leaf in convert(rules, source, abstract):
        variables[path].set_value(jnp.asarray(leaf, dtype=dtype))
    nnx.update(module, state)
