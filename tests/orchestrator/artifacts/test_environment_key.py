"""The components of an environment's key."""

from __future__ import annotations

from dataclasses import replace

import pytest
from samples import H200

from orchestrator.artifacts import manifest
from orchestrator.artifacts.manifest import differences, digest, environment_facts


@pytest.fixture(autouse=True)
def _no_gpu_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_capability", lambda: "9.0")


def test_the_same_host_and_configuration_give_the_same_key_in_any_order() -> None:
    one, two = (environment_facts(dict(pairs), H200) for pairs in ([("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")]))
    assert digest(one) == digest(two)
    assert differences(one, two) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("cores", 3), ("num_gpus", 8), ("memory_bytes", 1), ("ray", "3.0"), ("platform", "Linux-7"), ("transformers", "6.0")],
)
def test_what_no_artifact_depends_on_is_not_in_it(field: str, value: object) -> None:
    assert environment_facts({}, H200) == environment_facts({}, replace(H200, **{field: value}))


def test_of_a_driver_the_branch_counts_and_the_patch_does_not() -> None:
    driver = str(H200.driver)
    branch = driver.partition(".")[0]
    assert environment_facts({}, H200) == environment_facts({}, replace(H200, driver=f"{branch}.999.99"))
    assert differences(environment_facts({}, H200), environment_facts({}, replace(H200, driver="1.0"))) == ["driver"]


def test_a_host_without_a_gpu_has_no_component_of_one() -> None:
    without = environment_facts({}, replace(H200, gpu=None, num_gpus=0, driver=None, cuda=None))
    assert without.keys() & {"gpu", "cuda", "driver", "capability"} == set()
    assert {"torch", "python", "cpu", "cpu_instructions", "libc", "machine"} <= without.keys()


def test_a_component_that_one_side_lacks_differs() -> None:
    assert differences({"torch": "1"}, {"torch": "1", "inductor.x": "2"}) == ["inductor.x"]


def test_configuration_cannot_pass_for_a_component_of_the_host() -> None:
    assert environment_facts({"torch": "faked"}, H200)["torch"] == H200.torch
