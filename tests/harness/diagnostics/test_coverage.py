"""What modular settings should compile."""

from __future__ import annotations

from compile_sweep.harness.diagnostics.coverage import Expectation
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings
from workloads.captioning import Captioning


def test_a_part_switched_off_by_its_short_name_is_not_expected() -> None:
    workload = Captioning("tiny", 0)
    model = workload.build_model()
    settings = CompileSettings.parse("scope=modular,parts.encoder.compile=off")
    expected = Expectation.of(prepare(workload, settings, "cpu"), model, workload.optimizer(model, settings.optimizer))
    assert list(expected.targets) == ["model.decoder", "loss"]
