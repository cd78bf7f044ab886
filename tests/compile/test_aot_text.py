"""Reading what XLA compiled for a TPU."""

import pathlib
from collections import Counter

from parallax.compile import hlo, traffic

# Two layers of weights [256, 128] in a loop, one of them sliced out by a nested fusion, a cache [2, 1, 2, 256, 64].
TEXT = (pathlib.Path(__file__).parent / "step.txt").read_text()
LAYER, HEAD = 256 * 128 * 2, 512 * 128 * 2
UPDATE = 2 * 2 * 8 * 128 * 2                                   # 64 numbers in tiles of 128 lanes
CACHE, WEIGHT = (2, 1, 2, 256, 64), (256, 128)


def test_a_loop_counts_as_often_as_it_runs_and_a_fusion_what_it_slices():
    found = traffic.cost(hlo.parse(TEXT))
    assert found.nbytes == 2 * LAYER + HEAD + UPDATE
    assert found.kernels == Counter(attention=2)
    assert found.collectives == Counter({("all-reduce", 256 * 16 * 2): 2})


def test_seconds_are_asked_for_each_instruction_that_runs_and_added_up():
    program, asked = hlo.parse(TEXT), []

    def seconds(instruction, nbytes):
        asked.append((instruction.name, nbytes, hlo.iterations(instruction)))
        return 1.0

    assert traffic.cost(program, seconds).seconds == 2 + 2
    assert asked == [("fusion.3", LAYER, 6), ("fusion.4", HEAD, 1), ("fusion.5", UPDATE, 1)]


def test_a_kernel_is_listed_with_its_vmem_and_all_its_operands_in_hbm():
    assert traffic.kernels(hlo.parse(TEXT)) == {"attention": traffic.Kernel(4096, 2 * LAYER)}


def test_a_program_that_updates_in_place_copies_nothing():
    program = hlo.parse(TEXT)
    assert traffic.rewritten(program, [CACHE]) == [] and traffic.gathered(program, [WEIGHT]) == []


def test_a_copy_of_the_cache_is_found_in_any_order_of_its_dimensions():
    copy = "  %copy.9 = bf16[2,1,2,64,256]{4,3,2,1,0:T(8,128)(2,1)} transpose(%cache), dimensions={0,1,2,4,3}\n"
    local = copy.replace("copy.9", "copy.8").replace("(2,1)}", "(2,1)S(1)}")
    text = TEXT.replace("  ROOT %fusion.5", copy + local + "  ROOT %fusion.5")
    assert traffic.rewritten(hlo.parse(text), [CACHE]) == ["copy.9"]          # the other one is in VMEM
    assert traffic.cost(hlo.parse(text)).nbytes > traffic.cost(hlo.parse(TEXT)).nbytes


def test_a_fusion_that_makes_the_cache_anew_is_a_copy():
    text = TEXT.replace("ROOT %dynamic_update_slice.5", "%dynamic_update_slice.5").replace(
        "%constant.5)\n}", "%constant.5)\n  ROOT %negate.5 = bf16[2,1,2,256,64]{4,3,2,1,0:T(8,128)(2,1)} "
        "negate(%dynamic_update_slice.5)\n}")
    assert traffic.rewritten(hlo.parse(text), [CACHE]) == ["fusion.5"]


def test_a_gathered_weight_is_found():
    gather = "  %all-gather.1 = bf16[256,128]{1,0:T(8,128)(2,1)} all-gather(%x.2), channel_id=3, dimensions={0}\n"
    program = hlo.parse(TEXT.replace("  ROOT %fusion.5", gather + "  ROOT %fusion.5"))
    assert traffic.gathered(program, [WEIGHT]) == ["all-gather.1"] and traffic.gathered(program, [(128, 16)]) == []


def test_of_branches_the_dearest_counts():
    branch = """
%{name} (p.{name}: bf16[{size},128]) -> bf16[{size},128] {{
  %p.{name} = bf16[{size},128]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %negate.{name} = bf16[{size},128]{{1,0:T(8,128)(2,1)S(1)}} negate(%p.{name})
}}
"""
    call = "  %chosen = bf16[8,128]{1,0:T(8,128)(2,1)} conditional(%zero, %w.1, %w.1), branch_computations={%a, %b}\n"
    text = TEXT.replace("\nENTRY", branch.format(name="a", size=8) + branch.format(name="b", size=512) + "\nENTRY")
    text = text.replace("  ROOT %fusion.5", call + "  ROOT %fusion.5")
    assert traffic.cost(hlo.parse(text)).nbytes == traffic.cost(hlo.parse(TEXT)).nbytes + 512 * 128 * 2
