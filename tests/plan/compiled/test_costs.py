"""Costs read from a compiled program's text: known matmuls, loops, collectives, slices."""

from collections.abc import Mapping

import pytest

from animegamer_jax.plan.compiled import costs
from animegamer_jax.plan.compiled.costs import Collective, Cost, sent_by_a_chip
from animegamer_jax.plan.compiled.hlo import HLOError, groups_of, parse
from animegamer_jax.plan.compiled.schedule import Schedule

CONFIG = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
PROGRAM = f"""HloModule jit_f, is_scheduled=true

%fused (p.0: bf16[64,32], p.1: bf16[12,32,16]) -> bf16[64,16] {{
  %p.0 = bf16[64,32]{{1,0:T(8,128)}} parameter(0)
  %p.1 = bf16[12,32,16]{{2,1,0:T(8,128)}} parameter(1)
  %zero = s32[]{{:T(128)}} constant(0)
  %slice = bf16[1,32,16]{{2,1,0}} dynamic-slice(%p.1, %zero, %zero, %zero), dynamic_slice_sizes={{1,32,16}}
  %w = bf16[32,16]{{1,0}} bitcast(%slice)
  ROOT %product = bf16[64,16]{{1,0}} convolution(%p.0, %w), dim_labels=bf_io->bf
}}

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

%body (carry: (s32[], bf16[64,32], bf16[12,32,16])) -> (s32[], bf16[64,32], bf16[12,32,16]) {{
  %carry = (s32[]{{:T(128)}}, bf16[64,32]{{1,0}}, bf16[12,32,16]{{2,1,0}}) parameter(0)
  %n = s32[] get-tuple-element(%carry), index=0
  %one = s32[] constant(1)
  %left = bf16[64,32]{{1,0}} get-tuple-element(%carry), index=1
  %right = bf16[12,32,16]{{2,1,0}} get-tuple-element(%carry), index=2
  %fusion.1 = bf16[64,16]{{1,0}} fusion(%left, %right), kind=kOutput, calls=%fused, {CONFIG % 100}
  %gathered = (bf16[64,16]{{1,0}}, bf16[64,32]{{1,0}}) all-gather-start(%fusion.1), replica_groups=[4,2]<=[8], dimensions={{1}}
  %next = bf16[64,32]{{1,0}} all-gather-done(%gathered)
  %reduced = bf16[64,32]{{1,0}} all-reduce(%next), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, to_apply=%add
  %more = s32[] add(%n, %one), {CONFIG % 7}
  ROOT %out = (s32[], bf16[64,32]{{1,0}}, bf16[12,32,16]{{2,1,0}}) tuple(%more, %reduced, %right)
}}

%condition (carry.1: (s32[], bf16[64,32], bf16[12,32,16])) -> pred[] {{
  %carry.1 = (s32[], bf16[64,32]{{1,0}}, bf16[12,32,16]{{2,1,0}}) parameter(0)
  %end = s32[] constant(12)
  %n.1 = s32[] get-tuple-element(%carry.1), index=0
  ROOT %less = pred[] compare(%n.1, %end), direction=LT
}}

ENTRY %main (a: bf16[64,32], b: bf16[12,32,16]) -> bf16[64,32] {{
  %a = bf16[64,32]{{1,0}} parameter(0)
  %b = bf16[12,32,16]{{2,1,0}} parameter(1)
  %start = s32[] constant(0)
  %copied = s32[] copy(%start), {CONFIG % 3}
  %init = (s32[], bf16[64,32]{{1,0}}, bf16[12,32,16]{{2,1,0}}) tuple(%copied, %a, %b)
  %loop = (s32[], bf16[64,32]{{1,0}}, bf16[12,32,16]{{2,1,0}}) while(%init), condition=%condition, body=%body
  %kernel = (f32[8,128]{{1,0}}, bf16[64,32]{{1,0}}) custom-call(%a), custom_call_target="tpu_custom_call"
  %unknown = bf16[64,32]{{1,0}} custom-call(), custom_call_target="AllocateBuffer"
  %dear = bf16[64,32]{{1,0:T(8,128)S(1)}} negate(%a), {CONFIG % 10**13}
  ROOT %result = bf16[64,32]{{1,0}} get-tuple-element(%loop), index=1
}}
"""  # noqa: E501


def cost_of(
    text: str,
    *,
    devices: int,
    schedules: Mapping[str, float] | None = None,
    bytes_a_cycle: float = 1.0,
    branch_shares: tuple[float, ...] = (),
) -> Cost:
    """The cost with schedules of some instructions; by default bytes and cycles are the same."""
    return costs.cost_of(
        text,
        devices=devices,
        schedules={name: Schedule(cycles) for name, cycles in (schedules or {}).items()},
        bytes_a_cycle=bytes_a_cycle,
        link_cycles=lambda kind, groups, sent: sent,
        branch_shares=branch_shares,
    )


def test_matmuls_and_loops():
    """12 trips of a product of 64 x 32 and 32 x 16, which has a schedule; the kernel has one, too.

    The sums have only an earlier estimate, and `negate` not even that.
    """
    schedules = {"fusion.1": 150.0, "kernel": 70.0}
    cost = cost_of(PROGRAM, devices=8, schedules=schedules, bytes_a_cycle=1e9)
    assert cost.matmul_flops == 12 * 2 * 64 * 32 * 16
    assert cost.matmul_cycles == 12 * 150
    assert cost.kernel_cycles == 70
    assert cost.other_cycles == pytest.approx(12 * 7 + 3, abs=1e-3)
    assert (cost.unknown_loops, cost.without_schedule) == (0, 0)
    assert sum(cost.kernels.values()) == 1
    slow = cost_of(PROGRAM, devices=8, schedules=schedules)
    assert slow.matmul_cycles == 12 * 2 * (64 * 32 + 32 * 16 + 64 * 16), "the memory's time"
    assert slow.without_schedule == 1, "`negate`; what takes less than 1,000 cycles does not count"


def test_bytes_count_only_the_slice_and_only_hbm():
    cost = cost_of(PROGRAM, devices=8)
    assert cost.matmul_cycles == 12 * 2 * (64 * 32 + 32 * 16 + 64 * 16)
    # Two integers in and one out each trip; the copy; what `negate` reads, but not what it writes.
    assert cost.other_cycles == 12 * 3 * 4 + 2 * 4 + 2 * 64 * 32
    assert cost.kernel_cycles == 8 * 128 * 4 + 2 * 2 * 64 * 32
    assert cost.moved_bytes == cost.cycles


def test_collectives_overlap_what_runs_meanwhile():
    """Of a gathering that takes 6,144 cycles, what a product of 5,000 leaves; then none."""
    text = entry(
        f"""%c = bf16[256,32]{{1,0}} all-gather-start(%a), {GROUPS}
  %e = bf16[64,32]{{1,0:S(1)}} negate(%a)
  ROOT %d = bf16[256,32]{{1,0}} all-gather-done(%c)"""
    )
    sent = 2 * 256 * 32 * 3 / 4
    for busy, waited in ((5000.0, sent - 5000), (20_000.0, 0)):
        assert cost_of(text, devices=8, schedules={"e": busy}).waiting_cycles == waited
    at_once = text.replace("all-gather-start", "all-gather").replace("all-gather-done", "bitcast")
    assert cost_of(at_once, devices=8, schedules={"e": 5000.0}).waiting_cycles == sent


def on_sparse_cores(operation: str) -> str:
    """A program in which a SparseCore does something until its end is waited for."""
    called = f"""%offloaded (p: bf16[64,32]) -> bf16[256,32] {{
  %p = bf16[64,32]{{1,0}} parameter(0)
  ROOT %g = bf16[256,32]{{1,0}} {operation}(%p), {GROUPS}
}}, execution_thread="sparsecore"

"""
    text = entry(
        """%c = ((bf16[64,32]{1,0}), bf16[256,32]{1,0}) call-start(%a), to_apply=%offloaded, """
        """async_execution_thread="sparsecore"
  %e = bf16[64,32]{1,0:S(1)} negate(%a)
  ROOT %d = bf16[256,32]{1,0} call-done(%c)"""
    )
    return text.replace("ENTRY", called + "ENTRY")


def test_collectives_of_sparse_cores_overlap_the_same():
    sent = 2 * 256 * 32 * 3 / 4
    text = on_sparse_cores("all-gather")
    for busy, waited in ((5000.0, sent - 5000), (20_000.0, 0)):
        cost = cost_of(text, devices=8, schedules={"e": busy})
        assert cost.waiting_cycles == waited
        assert [(c.kind, c.sent) for c in cost.collectives.values()] == [("all-gather", sent)]
    copied = cost_of(on_sparse_cores("broadcast"), devices=8, schedules={"e": 0.0})
    assert (copied.waiting_cycles, dict(copied.collectives)) == (0, {})
    moved = 2 * (64 * 32 + 2 * 256 * 32)  # what is negated; the result, read and written
    assert copied.moved_bytes == moved


def by_size(cost: Cost) -> dict[tuple[str, int], Collective]:
    found = {(c.kind, c.group): c for c in cost.collectives.values()}
    assert len(found) == len(cost.collectives)
    return found


def test_collectives():
    found = by_size(cost_of(PROGRAM, devices=8))
    assert set(found) == {("all-gather", 2), ("all-reduce", 4)}
    whole = 2 * 64 * 32
    assert found["all-gather", 2].sent == 12 * whole / 2
    assert found["all-reduce", 4].sent == 12 * 2 * whole * 3 / 4
    assert found["all-reduce", 4].count == 12


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups={{0,2,4},{1,3,5}}", ((0, 2, 4), (1, 3, 5))),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'a','c'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'c','a'}", ((0, 2, 1, 3),)),
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
    ],
)
def test_groups(text, groups):
    assert groups_of(f", {text}, other=1", devices=4) == groups


def test_groups_of_an_unknown_form():
    with pytest.raises(HLOError, match="replica_groups=iota"):
        groups_of(", replica_groups=iota(8), other=1", devices=16)


GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
COUNTERS = "u32[]{:S(2)}, u32[]{:S(2)}"


def entry(lines: str, *computations: str, parameters: str = "%a = bf16[64,32]{1,0} parameter(0)"):
    """A program's text: other computations, then one that is entered."""
    return "\n".join(
        [*computations, "ENTRY %main (a: bf16[64,32]) -> bf16[1] {", parameters, lines, "}"]
    )


@pytest.mark.parametrize(
    ("kind", "result", "started", "done"),
    [
        (
            "collective-permute",
            "bf16[64,32]{1,0}",
            f"(bf16[64,32]{{1,0}}, bf16[64,32]{{1,0:S(1)}}, {COUNTERS})",
            "bf16[64,32]{1,0:S(1)}",
        ),
        ("all-reduce", "bf16[64,32]{1,0}", "bf16[64,32]{1,0}", "bf16[64,32]{1,0}"),
        (
            "all-reduce",
            "(bf16[64,32]{1,0}, f32[8]{0})",
            "(bf16[64,32]{1,0}, f32[8]{0})",
            "(bf16[64,32]{1,0}, f32[8]{0})",
        ),
        (
            "all-gather",
            "bf16[256,32]{1,0}",
            f"(bf16[64,32]{{1,0}}, bf16[256,32]{{1,0}}, {COUNTERS})",
            "bf16[256,32]{1,0}",
        ),
        (
            "all-gather",
            "(bf16[256,32]{1,0}, f32[32]{0})",
            "((bf16[64,32]{1,0}, f32[8]{0}), (bf16[256,32]{1,0}, f32[32]{0}))",
            "(bf16[256,32]{1,0}, f32[32]{0})",
        ),
    ],
)
def test_collectives_that_run_next_to_others_send_the_same(kind, result, started, done):
    """Whatever the starting one's tuple holds: operands, results, counters."""
    at_once = entry(f"ROOT %c = {result} {kind}(%a), {GROUPS}")
    overlapped = entry(
        f"%c = {started} {kind}-start(%a), {GROUPS}\nROOT %d = {done} {kind}-done(%c)"
    )
    one, other = (by_size(cost_of(text, devices=8)) for text in (at_once, overlapped))
    assert one == other
    results = 2 * 32 * (256 if kind == "all-gather" else 64)
    if result.startswith("("):
        results += 4 * (32 if kind == "all-gather" else 8)
    share = {"collective-permute": 1, "all-reduce": 2 * 3 / 4, "all-gather": 3 / 4}[kind]
    assert one[kind, 4].sent == share * results


def test_a_kernels_metadata_may_span_lines():
    """What follows belongs to the same computation, though a line begins with a bracket."""
    kernel = (
        '%k = bf16[64,32]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"block_q\\": 512}"\n'
        '}}, metadata={op_name="kernel"}'
    )
    reduced = f"ROOT %r = bf16[64,32]{{1,0}} all-reduce(%k), {GROUPS}"
    cost = cost_of(entry(f"{kernel}\n{reduced}"), devices=8)
    assert by_size(cost)["all-reduce", 4].sent == 2 * 3 / 4 * 2 * 64 * 32


def test_what_starts_and_never_ends():
    with pytest.raises(HLOError, match="no all-gather-done"):
        cost_of(entry(f"%c = bf16[8]{{0}} all-gather-start(%a), {GROUPS}"), devices=8)


SCATTER = f"""%all-reduce-scatter (input: bf16[64,32]) -> bf16[17,32] {{
  %input = bf16[64,32]{{1,0}} parameter(0)
  %zero = bf16[] constant(0)
  %pad = bf16[68,32]{{1,0}} pad(%input, %zero), padding=0_4x0_0
  %sum = bf16[68,32]{{1,0}} all-reduce(%pad), channel_id=2, {GROUPS}, to_apply=%add
  %place = u32[] constant(0)
  ROOT %mine = bf16[17,32]{{1,0}} dynamic-slice(%sum, %place, %place), dynamic_slice_sizes={{17,32}}
}}"""


def test_a_reduce_scatter_is_a_fusion():
    """An all-reduce of 68 rows of which each of four chips keeps 17: each sends three times 17."""
    text = entry(
        "ROOT %f = bf16[17,32]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter", SCATTER
    )
    cost = cost_of(text, devices=8)
    assert set(by_size(cost)) == {("reduce-scatter", 4)}
    assert by_size(cost)["reduce-scatter", 4].sent == 3 * 17 * 32 * 2
    assert cost.other_cycles == 0, "its traffic is the collective's"


GATHER = f'bf16[256,32]{{1,0}} all-gather(%p), channel_id=8, {GROUPS}, frontend_attributes={{chain_id="0"}}'  # noqa: E501
START = "AsyncCollectiveStart"
CHAIN = (
    f"""%starting (p: bf16[64,32]) -> (bf16[64,32], bf16[256,32], u32[]) {{
  %p = bf16[64,32]{{1,0}} parameter(0)
  %g = {GATHER}
  ROOT %s = (bf16[64,32]{{1,0}}, bf16[256,32]{{1,0}}) custom-call(%g), custom_call_target="{START}"
}}""",
    f"""%running (p: bf16[64,32], q: bf16[256,32], r: bf16[32,16]) -> (bf16[64,16]) {{
  %p = bf16[64,32]{{1,0}} parameter(0)
  %q = bf16[256,32]{{1,0}} parameter(1)
  %r = bf16[32,16]{{1,0}} parameter(2)
  %g = {GATHER}
  %w = bf16[64,32]{{1,0}} slice(%q), slice={{[0:64], [0:32]}}
  %product = bf16[64,16]{{1,0}} convolution(%w, %r), dim_labels=bf_io->bf
  ROOT %t = (bf16[64,16]{{1,0}}, bf16[64,32]{{1,0}}, bf16[256,32]{{1,0}}) tuple(%product, %p, %g)
}}""",
    f"""%ending (p: bf16[64,32], q: bf16[256,32]) -> bf16[256,32] {{
  %p = bf16[64,32]{{1,0}} parameter(0)
  %q = bf16[256,32]{{1,0}} parameter(1)
  %g = {GATHER}
  ROOT %d = bf16[256,32]{{1,0}} custom-call(%p, %q, %g), custom_call_target="AsyncCollectiveDone"
}}""",
)  # fmt: skip


def test_a_collective_next_to_several_fusions_counts_once():
    """It stands in the fusion that starts it, in those that run meanwhile, and in the last one."""
    lines = """%w = bf16[32,16]{1,0} parameter(1)
%one = (bf16[64,32]{1,0}, bf16[256,32]{1,0}) fusion(%a), kind=kCustom, calls=%starting
%x = bf16[64,32]{1,0} get-tuple-element(%one), index=0
%y = bf16[256,32]{1,0} get-tuple-element(%one), index=1
%two = (bf16[64,16]{1,0}, bf16[64,32]{1,0}, bf16[256,32]{1,0}) fusion(%x, %y, %w), kind=kOutput, calls=%running
%z = bf16[256,32]{1,0} get-tuple-element(%two), index=2
ROOT %three = bf16[256,32]{1,0} fusion(%x, %z), kind=kCustom, calls=%ending"""  # noqa: E501
    cost = cost_of(entry(lines, *CHAIN), devices=8)
    assert by_size(cost)["all-gather", 4].count == 1
    assert by_size(cost)["all-gather", 4].sent == 256 * 32 * 2 * 3 / 4
    assert cost.matmul_flops == 2 * 64 * 32 * 16
    assert cost.matmul_cycles == 2 * (64 * 32 + 32 * 16 + 64 * 16), "a slice, weights, the result"
    assert cost.other_cycles == 0
    without_start = [text.replace(START, "Other") for text in CHAIN]
    found = by_size(cost_of(entry(lines, *without_start), devices=8))
    assert found["all-gather", 4].count == 3, "rather too much than nothing"


@pytest.mark.parametrize(
    ("started", "done", "moved"),
    [
        # into the chip's fast memory: the source is read
        ("(bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]{:S(2)}) copy-start(%a)",
         "bf16[64,32]{1,0:S(1)} copy-done(%s)", 64 * 32),
        ("((bf16[64,32]{1,0}), bf16[16,32]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), slice={0:16}",
         "bf16[16,32]{1,0:S(1)} slice-done(%s)", 16 * 32),
        # out of it: the result is written
        ("(bf16[8,32]{1,0}, bf16[8,32]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%near)",
         "bf16[8,32]{1,0} copy-done(%s)", 8 * 32),
        # within HBM: both
        ("(bf16[64,32]{1,0}, bf16[64,32]{0,1}, u32[]{:S(2)}) copy-start(%a)",
         "bf16[64,32]{1,0} copy-done(%s)", 2 * 64 * 32),
    ],
)  # fmt: skip
def test_transfers_move_their_result(started, done, moved):
    near = "%near = bf16[8,32]{1,0:S(1)} bitcast(%a)"
    cost = cost_of(entry(f"{near}\n%s = {started}\nROOT %d = {done}"), devices=1)
    assert cost.moved_bytes == cost.other_cycles == 2 * moved


def test_transfers_use_the_time_of_others():
    """A copy of 4,096 bytes while a product leaves the memory idle for some cycles."""
    text = entry(
        """%c = (bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %e = bf16[64,32]{1,0:S(1)} negate(%a)
  ROOT %d = bf16[64,32]{1,0:S(1)} copy-done(%c)"""
    )
    for busy, cycles in ((5000.0, 5000 + 4096 - 904), (9000.0, 9000)):
        cost = cost_of(text, devices=1, schedules={"e": busy})
        assert cost.other_cycles == cycles
        assert cost.moved_bytes == 2 * 4096


def test_branches_run_as_often_as_is_known():
    """Otherwise the most expensive one counts."""
    lines = """%n = s32[] constant(1)
  ROOT %c = bf16[64,32]{1,0} conditional(%n, %a, %a), branch_computations={%few, %many}"""
    branch = """%{0} ({0}.0: bf16[64,32]) -> bf16[64,32] {{
  %{0}.0 = bf16[64,32]{{1,0}} parameter(0)
  ROOT %{0}.1 = bf16[64,32]{{1,0}} negate(%{0}.0)
}}"""
    text = entry(lines, branch.format("few"), branch.format("many"))
    options = {"schedules": {"few.1": 100.0, "many.1": 900.0}, "bytes_a_cycle": 1e9}
    assert cost_of(text, devices=1, **options).other_cycles == 900
    assert cost_of(text, devices=1, branch_shares=(0.75, 0.25), **options).other_cycles == 300


def test_what_goes_to_other_slices():
    """A send to the network between slices; the host's own transfers do not count."""
    name = 'frontend_attributes={_xla_host_transfer_handler_name="%s"}'
    lines = "\n".join(
        f"%s{n} = (bf16[64,32]{{1,0}}, u32[], token[]) send(%a, %t), {name % handler}"
        for n, handler in enumerate(("xla_megascale_runtime", "another"))
    )
    text = entry(f"%t = token[] after-all()\n{lines}\nROOT %o = bf16[64,32]{{1,0}} bitcast(%a)")
    assert cost_of(text, devices=2).sent_between_slices == 2 * 64 * 32


UPDATE = "dynamic-update-slice(%p, %row, %n, %n)"
ROW = "%row = bf16[1,1000]{1,0} parameter(1)\n  %n = s32[] constant(3)"
WRITE = f"""%write (p: bf16[30,1000], row: bf16[1,1000]) -> bf16[30,1000] {{
  %p = bf16[30,1000]{{1,0}} parameter(0)
  {ROW}
  ROOT %u = bf16[30,1000]{{1,0}} {UPDATE}
}}"""
WRITE_TWO = f"""%write_two (p: bf16[30,1000], row: bf16[1,1000]) -> (bf16[30,1000], bf16[1,1000]) {{
  %p = bf16[30,1000]{{1,0}} parameter(0)
  {ROW}
  %u = bf16[30,1000]{{1,0}} {UPDATE}
  %twice = bf16[1,1000]{{1,0}} add(%row, %row)
  ROOT %t = (bf16[30,1000]{{1,0}}, bf16[1,1000]{{1,0}}) tuple(%u, %twice)
}}"""


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        (f"ROOT %o = bf16[30,1000]{{1,0}} {UPDATE}", 2),
        ("ROOT %o = bf16[30,1000]{1,0} fusion(%p, %row), kind=kLoop, calls=%write", 2),
        ("ROOT %o = bf16[30,1000]{1,0:S(1)} fusion(%p, %row), kind=kLoop, calls=%write", 1),
        (
            "ROOT %o = (bf16[30,1000]{1,0}, bf16[1,1000]{1,0}) fusion(%p, %row), kind=kLoop, "
            "calls=%write_two",
            3,
        ),
    ],
)
def test_an_update_in_place_moves_the_update(line, rows):
    """One row of thirty is read, and written where the buffer is in HBM."""
    parameters = f"%p = bf16[30,1000]{{1,0}} parameter(0)\n  {ROW}"
    cost = cost_of(entry(line, WRITE, WRITE_TWO, parameters=parameters), devices=1)
    indices = 0 if "fusion" in line else 2 * 4
    assert cost.other_cycles == 2 * rows * 1000 + indices


def test_a_ring_sends():
    sent = {
        kind: sent_by_a_chip(kind, result=100.0, group=4)
        for kind in ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
    }
    assert sent == {
        "all-reduce": 150.0,
        "all-gather": 75.0,
        "reduce-scatter": 300.0,
        "collective-permute": 100.0,
    }


def convolution(attributes: str, *, out: str, left: str = "1,8,8,3", right: str = "3,3,3,5"):
    text = f"""ENTRY %main (a: f32[{left}], b: f32[{right}]) -> f32[{out}] {{
  %a = f32[{left}]{{3,2,1,0}} parameter(0)
  %b = f32[{right}]{{3,2,1,0}} parameter(1)
  ROOT %c = f32[{out}]{{3,2,1,0}} convolution(%a, %b), {attributes}, dim_labels=b01f_01io->b01f
}}"""
    return cost_of(text, devices=1).matmul_flops


def test_convolutions_count_what_meets():
    """Taps on padding and in holes multiply nothing."""
    inside = "window={size=3x3}"
    assert convolution(inside, out="1,6,6,5") == 2 * 36 * 9 * 3 * 5
    same = "window={size=3x3 pad=1_1x1_1}"
    assert convolution(same, out="1,8,8,5") == 2 * (8 + 7 + 7) ** 2 * 3 * 5
    strided = "window={size=3x3 stride=2x2 pad=0_1x0_1}"
    assert convolution(strided, out="1,4,4,5") == 2 * (4 + 4 + 3) ** 2 * 3 * 5
    spread = "window={size=3x3 pad=1_2x1_2 lhs_dilate=2x2}"
    # Of 16 outputs: the middle tap meets an input at every even one, the others at odd ones.
    assert convolution(spread, out="1,16,16,5") == 2 * (8 + 8 + 7) ** 2 * 3 * 5


def test_a_convolution_of_groups_of_the_batch():
    """The batch of 4 makes 2 groups; each output sees its own group's two images only."""
    attributes = "window={size=3x3}, batch_group_count=2"
    found = convolution(attributes, out="2,6,6,4", left="4,8,8,3", right="3,3,3,4")
    assert found == 2 * (2 * 36 * 4) * (9 * 3)


def test_what_is_no_program():
    with pytest.raises(HLOError, match="no ENTRY computation"):
        parse("hello")
