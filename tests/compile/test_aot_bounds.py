"""What chips can do, and names of hardware and models."""

import json

import jax
import pytest

from parallax.compile import chips, shapes, targets
from parallax.compile.jobs import Job
from parallax.models import Model
from parallax.testing import tiny_config

V5E, V5P, V7X = (chips.CHIPS[name] for name in ("v5e", "v5p", "tpu7x"))


def job(**changes):
    settings = dict(config=tiny_config(num_kv_heads=2, num_heads=4), target=targets.resolve("v5e"), rows=8, batch=1,
                    context=64, capacity=128, depth=4)
    return Job(**settings | changes)


def test_a_bound_is_the_slower_of_memory_and_matrix_units():
    assert chips.bound(V5E, 819e9, 0) == (1.0, "HBM")
    assert chips.bound(V5E, 819e9, 2 * 197e12) == (2.0, "matrix")
    assert chips.bound(V7X, 7380e9, 0) == (2.0, "HBM")                    # a device is half the chip


def test_seconds_are_counted_in_the_chips_own_cycles():
    assert chips.seconds(V5E, 1.5e9) == 1.0
    assert chips.seconds(V5P, 3.5e9) == 2.0


def test_a_clock_is_that_of_the_published_peak():
    """A v5e core has four units of 128 x 128, a v6e core two of 256 x 256 that take two rows a cycle."""
    for name, per_cycle in (("v4", 2 * 4 * 128 * 128), ("v5e", 4 * 128 * 128), ("v5p", 2 * 4 * 128 * 128),
                            ("v6e", 4 * 256 * 256), ("tpu7x", 2 * 4 * 256 * 256)):
        chip = chips.CHIPS[name]
        assert chip.clock_ghz == pytest.approx(chip.tflops * 1e3 / (2 * per_cycle), rel=0.01), name


def test_a_ring_of_four_reduces_its_bytes_three_quarters_times_and_over_four_hops():
    assert chips.wire_seconds(V5E, "all-reduce", 50e9, 4) == pytest.approx(0.75 + 4e-6)
    assert chips.wire_seconds(V5E, "collective-permute", 50e9, 4) == pytest.approx(1 + 1e-6)
    assert chips.wire_seconds(V5P, "all-gather", 100e9, 4) == pytest.approx(0.375 + 2e-6)


def test_a_plain_name_takes_the_smallest_topology_with_enough_devices():
    assert targets.resolve("v5e").topology == (2, 2)
    assert targets.resolve("v5e", 8).topology == (2, 4)
    assert targets.resolve("v5p", 16).topology == (2, 2, 4)
    assert targets.resolve("tpu7x", 8).topology == (2, 2, 1)             # two devices to a chip
    assert targets.resolve("v5e:4x4", 4).topology == (4, 4)
    assert targets.resolve("sm_90").topology == ()


@pytest.mark.parametrize("name, tensor, message", [
    ("v5", 1, r"unknown target 'v5': expected one of v4, .*did you mean 'v5[ep]'\?$"),
    ("v5e:2", 1, r"has no topology of 2 numbers: expected for example v5e:2x2$"),
    ("v5e:2x2", 8, r"^--tensor 8 needs 8 devices, target v5e:2x2 has 4$"),
    ("sm_90:2x2", 1, r"has a topology, which only TPUs have: expected sm_90$"),
    ("sm_80", 2, r"^a program for 2 devices is compiled for TPUs only: leave --tensor out for sm_80$"),
])
def test_a_target_that_is_none_is_refused_in_a_line(name, tensor, message):
    with pytest.raises(ValueError, match=message):
        targets.resolve(name, tensor)


def test_a_missing_compiler_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    for name, package, extra in (("v5e", "libtpu", "tpu-aot"), ("sm_90", "triton", "gpu-aot")):
        with pytest.raises(ValueError) as refused:
            targets.check_installed(targets.resolve(name))
        assert str(refused.value) == (f"compiling for {name} needs {package}, which is not installed: "
                                      f"pip install 'parallax-decoding[{extra}]'")


def test_the_environment_of_a_compiling_process_has_no_flags_for_this_machine(monkeypatch):
    monkeypatch.setattr(targets.os, "environ", {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    targets.set_environment("/dumps")
    assert "XLA_FLAGS" not in targets.os.environ and targets.os.environ["JAX_PLATFORMS"] == "cpu"
    assert "--xla_jf_dump_to=/dumps " in targets.os.environ["LIBTPU_INIT_ARGS"]


@pytest.mark.parametrize("name, millions", [("llama-3.2-1b", 1236), ("qwen3-0.6b", 596), ("llama-3-8b", 8030),
                                            ("smollm2-135m", 134.5)])
def test_presets_have_the_published_number_of_parameters(name, millions):
    found = jax.eval_shape(Model(shapes.resolve(name).replace(scan_layers=True)).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(found)) / 1e6 == pytest.approx(millions, rel=0.001)


def test_a_folder_and_a_shipped_model_give_their_configs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shapes.PRESETS["qwen3-0.6b"]))
    assert shapes.resolve(str(tmp_path)) == shapes.resolve("qwen3-0.6b")
    assert shapes.resolve("tiny-python").num_layers > 0


def test_an_unknown_model_is_refused_in_a_line(tmp_path):
    with pytest.raises(ValueError, match=r"unknown model 'lama-3-8b'.*did you mean 'llama-3-8b'\?$"):
        shapes.resolve("lama-3-8b")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        shapes.resolve(str(tmp_path))


def test_a_draft_is_chains_side_by_side():
    assert job(rows=1).parents == (0,) and job(rows=1).levels == 0
    assert job(rows=4).parents == (0, 0, 1, 2)
    assert job(rows=8, depth=4).parents == (0, 0, 1, 2, 3, 0, 5, 6)
    assert job(rows=8, depth=4).levels == 4


@pytest.mark.parametrize("changes, message", [
    (dict(rows=0), "^rows must be at least 1, got 0$"),
    (dict(batch=0), "^batch must be at least 1, got 0$"),
    (dict(capacity=66), "^capacity=66 is too small for a context of 64 and a step of up to 5 tokens$"),
    (dict(target=targets.resolve("v5e", 4)), "^--tensor 4 does not divide the model's 2 key/value heads$"),
])
def test_settings_that_do_not_fit_are_refused_in_a_line(changes, message):
    with pytest.raises(ValueError, match=message):
        job(**changes)
