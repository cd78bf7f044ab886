"""Reading the static schedule of a kernel."""

import pytest

from parallax.compile import schedule

# What libtpu dumps, made short: a grid loop with the test whether the step is in the grid, and in it two `pl.when`s of
# the kernel, the second of them with a loop.
MODULE = """\
module attributes {stable_mosaic.version = 15 : i64} {
  func.func @mine(%arg0: i32, %arg1: i32) attributes {iteration_bounds = array<i64: 2, -9223372036854775808>,
    window_params = [{transform_indices = @transform_0, window_bounds = array<i64: 1, 512, 128>}]} {
    %c0_i32 = arith.constant 0 : i32
    %c5_i32 = arith.constant 5 : i32
    %7 = arith.addi %c0_i32, %c5_i32 : i32
    %c1_i32 = arith.constant 1 : i32
    scf.for %arg2 = %c0_i32 to %7 step %c1_i32  : i32 {
    }
"""


def dump():
    """(final_bundles, utilization): each bundle uses one slot of the first unit, those of the second region two."""
    lines, used = [], []

    def add(text="{ %1 = sadd }", label="  ", depth=1, units=1):
        mark = " ".join(">" * depth)
        lines.append(f" 0x{len(lines):x} {label} : {mark} {text}")
        used.append(f"{units} 0 0")

    add(depth=0)
    add("{ %2 = sld }  /* loop */", "LB")
    add("{ %3 = sbr.rel (%p1) target = $region9 }")                       # not in the grid
    for _ in range(4):
        add()
    add("{ %4 = sbr.rel (%p2) target = $region3 }")
    for _ in range(4 + 10):                                               # delay slots, then the region
        add()
    add("{ %5 = sadd } /* End region 3 */", "PF")
    add("{ %6 = sbr.rel (!%p3) target = $region4 }")
    for _ in range(4):
        add()
    add("{ %7 = sadd }", "LB", 2, 2)
    add("{ %8 = sadd\n  goes on }", depth=2, units=2)
    add("{ %9 = sbr.rel (!%p4) target = $region8 }", depth=2, units=2)
    add("{ %10 = sadd } /* End region 4 :: Start/End empty region 9 */", "PF")
    add("{ %11 = sbr.rel (!%p5) target = $region1 }")                     # the back edge
    add("{}", depth=0)
    add("{ %12 = sadd }", depth=0)
    return "\n".join(lines), "== CAPACITY:\nMXU, VALU, VLOAD:FILL\n 4 2 3\n== UTILIZATION:\n" + "\n".join(used) + "\n"


def test_a_schedule_is_cut_into_bookkeeping_and_regions():
    found = schedule.analyse(*dump(), MODULE)
    assert found.grid == (2, None) and found.windows == ((1, 512, 128),)
    assert found.regions == (schedule.Region(3 * 5, True), schedule.Region(10, True))     # the loop runs five times
    assert found.bookkeeping == 1 + 1 + 4 + 1 + 4 + 1 + 1 + 4 + 1 + 1
    assert found.step == found.bookkeeping + 15 and found.certain
    assert found.bundles == 35


def test_a_loop_of_unknown_length_is_not_what_most_steps_do():
    found = schedule.analyse(*dump(), MODULE.replace("to %7", "to %8"))
    assert found.regions == (schedule.Region(10, True), schedule.Region(3, False))
    assert found.step == found.bookkeeping + 10 and found.certain


def test_a_step_with_a_loop_of_unknown_length_says_so():
    bundles, used = dump()
    bundles = bundles.replace("target = $region3", "target = $region99")                 # the other one is left
    assert not schedule.analyse(bundles, used, MODULE.replace("to %7", "to %8")).certain


def test_use_of_units_is_a_share_of_the_slots_of_a_step():
    found = schedule.analyse(*dump(), MODULE)
    assert found.used == {"MXU": pytest.approx((found.bookkeeping + 2 * 15) / (4 * found.step)), "VALU": 0.0}
    assert found.spills == 0


def test_reading_a_folder_finds_the_kernel_among_other_operations(tmp_path):
    bundles, used = dump()
    (tmp_path / "123-mine.2-70-final_bundles.txt").write_text(bundles)
    (tmp_path / "123-mine.2-71-schedule-analysis_final_bundles.txt").write_text("no bundles\n")
    (tmp_path / "123-mine.2-68-final_hlo-static-per-bundle-utilization.txt").write_text(used)
    (tmp_path / "124-mine_fusion-70-final_bundles.txt").write_text(" 0x0   :  { %1 = sadd }\n")
    assert schedule.read(tmp_path, "mine") is None                                         # which grid?
    (tmp_path / "122-0000-mosaic-dump-anonymous-post-deserialization.txt").write_text(MODULE)
    assert schedule.read(tmp_path, "mine") == schedule.analyse(bundles, used, MODULE)
    assert schedule.read(tmp_path, "other") is None
    assert schedule.lengths(tmp_path) == {"mine.2": 35, "mine_fusion": 1}


def test_dumps_are_gone_before_and_behind_a_compilation(tmp_path):
    (tmp_path / "old").write_text("")
    with schedule.emptied(str(tmp_path)) as folder:
        assert not list(folder.iterdir())
        (folder / "new").write_text("")
    assert not list(tmp_path.iterdir())
