"""How `make test` distributes tests over processes."""

from __future__ import annotations

import pytest


@pytest.mark.ray
def test_a_test_that_uses_ray_is_in_the_group_that_one_process_runs(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith("@ray")
