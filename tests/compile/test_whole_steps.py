"""Whole decode steps, compiled for TPUs that are not there."""

import pytest

from parallax.compile import programs, shapes, targets, workers
from parallax.compile.chips import CHIPS
from parallax.compile.jobs import Job

pytestmark = pytest.mark.aot


@pytest.fixture(scope="module")
def worker():
    with workers.Worker() as found:
        yield found


@pytest.mark.parametrize("model, target, tensor", [
    ("llama-3.2-1b", "v5e", 1), ("qwen3-0.6b", "v5e", 1), ("llama-3-8b", "v5e", 4), ("llama-3-8b", "v5p", 1)])
def test_a_verify_step_fits_and_copies_and_gathers_nothing_large_and_reads_all_once(worker, model, target, tensor):
    config = shapes.resolve(model).replace(dtype="bfloat16", kernels="pallas")
    step, reports = worker.run(programs.compiled, Job(
        config=config, target=targets.resolve(target, tensor), rows=16, batch=1, context=2048, capacity=4096, depth=8))
    assert step.reason is None
    assert step.arguments + step.temporary < CHIPS[target].hbm_gb * 1e9
    assert [*step.cache_copies, *step.weight_copies, *step.weight_gathers] == []
    assert 1 <= step.accessed / step.least_bytes < 1.15
    assert step.kernels["attention"] == config.num_layers
    assert "attention" in {report.kernel for report in reports}
    assert all(report.scheduled is not None and report.memory > 0 for report in reports)
    assert (step.collectives > 0) == (tensor > 1)


def test_a_model_that_does_not_fit_says_so(worker):
    config = shapes.resolve("llama-3-8b").replace(dtype="float32", kernels="pallas")
    step, _ = worker.run(programs.compiled, Job(config=config, target=targets.resolve("v5e"), rows=1, batch=1,
                                                context=64, capacity=128, depth=1))
    assert "hbm" in step.reason.lower() and "\n" not in step.reason
