"""Experts of a mixture, whose product autocast leaves in float32: found, and cast where a setting says so."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from compile_sweep.script import session_results
from compile_sweep.script.apply.huggingface import IN_AUTOCAST
from tests.scripts.conftest import Run

pytestmark = pytest.mark.slow

LEAVES = "autocast leaves the experts of 2 layers in float32, because it does not reach grouped_mm: try autocast_experts=on"


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """The dtypes of the weights that `grouped_mm` is called with."""
    seen: set[torch.dtype] = set()
    grouped_mm = nn.functional.grouped_mm

    def noted(inputs: Tensor, weights: Tensor, **kwargs: Tensor) -> Tensor:
        seen.add(weights.dtype)
        return grouped_mm(inputs, weights, **kwargs)

    monkeypatch.setattr(nn.functional, "grouped_mm", noted)
    return seen


def test_experts_that_autocast_does_not_reach_are_found_and_cast_where_a_setting_says_so(
    run: Run, dtypes: set[torch.dtype]
) -> None:
    losses = []
    for settings, is_cast in (("scope=eager,as_written=on", False), ("scope=eager,autocast_experts=on", True)):
        session, error = run("experts.py", settings, "float32")
        assert error is session.error is None
        assert session_results.model_facts(session)["float32_experts"] is True
        assert (LEAVES in session_results.findings(session)) is not is_cast
        assert (torch.bfloat16 in dtypes) is is_cast, "the steps before the setting is applied are the script's own"
        model = vars(sys.modules["__main__"])["model"]
        assert IN_AUTOCAST not in str(model.config.to_dict()), "a checkpoint names no implementation that only a sweep has"
        assert all(weights.dtype == torch.float32 for weights in model.parameters())
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[1] != losses[0]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_cast_experts_are_one_graph_with_the_layers_around_them(run: Run) -> None:
    session, error = run("experts.py", "scope=regional,dynamic=auto,backend=aot_eager,autocast_experts=on", "float32")
    assert error is session.error is None
    figures = session_results.measurement(session)
    assert (figures.graphs, figures.graph_break_reasons, figures.fallbacks) == (1, [], [])


@pytest.mark.parametrize("kind", ["bfloat16", "loop"])
def test_experts_that_autocast_needs_not_reach_are_left_alone(run: Run, kind: str) -> None:
    session, error = run("experts.py", "scope=eager,as_written=on", kind)
    assert error is session.error is None
    assert session_results.model_facts(session)["float32_experts"] is False
    session, error = run("experts.py", "scope=eager,autocast_experts=on", kind)
    assert error is None
    assert "the script trains none; leave it out" in str(session.error)
