"""Whatever a workload's code does, its trial ends with a verdict of its own, and nothing of it is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from misbehaving_workloads import FAULTS, IN_A_STEP, LOSSES

from compile_sweep.schema.outcome import Label
from orchestrator.run.forked_attempt import Servers
from tests.orchestrator.run.test_local_runner import tried

pytestmark = [pytest.mark.slow, pytest.mark.nightly("some 90 trials of workloads that misbehave, one after another")]

EXPECTED: dict[str, Label | None] = {
    **dict.fromkeys(FAULTS),
    **dict.fromkeys([*IN_A_STEP, *LOSSES], Label.EXCEPTION),
    **dict.fromkeys(("sleeps", "is_a_tuple", "is_a_list", "is_in_float16", "changes_threads", "makes_later_files_unreadable")),
    **dict.fromkeys(("exits_with_3", "exits_with_0", "closes_files", "kills_its_parent"), Label.WORKER_DIED),
    **dict.fromkeys(
        ("may_write_no_files", "replaces_json", "replaces_builtins", "signals_itself", "hangs_up"), Label.WORKER_DIED
    ),
    **dict.fromkeys(("aborts", "reads_address_0"), Label.CRASHED),
    **dict.fromkeys(("is_nan", "is_infinite", "is_huge", "differs_each_time", "has_no_finite_gradient"), Label.EAGER_UNSTABLE),
    **dict.fromkeys(("raises_markup", "computes_on_meta", "computes_in_float64", "stops_gradients"), Label.EXCEPTION),
    **dict.fromkeys(("exits_in_a_hook", "stops_the_clock", "hooks_imports"), Label.EXCEPTION),
    "allocates_terabytes": Label.OUT_OF_MEMORY,
}


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with closing(Servers(imports_workload=False)) as made:
        yield made


@pytest.mark.parametrize("fault", FAULTS)
def test_a_trial_ends_with_a_verdict(fault: str, servers: Servers, tmp_path: Path) -> None:
    assignment, attempt, _ = tried(tmp_path, f"misbehaving_workloads:{fault}", servers)
    verdict = attempt.verdict(assignment)
    assert verdict.label is EXPECTED[fault], verdict.reason
    assert (attempt.figures is not None) == (EXPECTED[fault] in (None, Label.EAGER_UNSTABLE)), "what was measured is kept"
    assert [one.pid for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "4321"]] == []
