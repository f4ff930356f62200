"""Cycles of a program's loops, from the compiler's schedules."""

from animegamer_jax.plan.compiled.schedule import Schedule, compiler_flags, read_schedules

BUNDLES = """LB: loop body
     0   :  { %4 = smov 0 }
   0x1 LB: > { %5 = sadd.s32 1, %6 /* iteration index, stage = 1 */ }
   0x2   : > { %7 = sbr.rel (%p1) target = $region3 }
   0x3   :  {}
   0x4 LB: >> { %8 = vld [vmem:%9] }
   0x5   : >> { %10 = sbr.rel (!%p2) target = $region4 }
   0x6 PF: > { %p3 = scmp.ge.s32.totalorder %s1_s2, 12 /* loop exit test */ }
   0x7   :  { %11 = sbr.rel (!%p3) target = $region5 }
   0x8   :  {} /* exit bundle: %fusion.7 = fusion(%a) */
"""


def test_schedules_of_a_program(tmp_path):
    """A loop of ten blocks, two trips of which fill and empty it; one inside of unknown length."""
    (tmp_path / "123-fusion.7-01-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "123-fusion.7-00-schedule-analysis_final_bundles.txt").write_text("total: 9")
    assert read_schedules(tmp_path) == {"fusion.7": Schedule(63.0, 1)}
    assert str(tmp_path) in compiler_flags(tmp_path)
