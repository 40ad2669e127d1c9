"""A Ray that does not start, or a cluster that does not answer, is one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from orchestrator.errors import SessionError
from orchestrator.session import ray_session


def fails(*arguments: Any, **options: Any) -> None:
    raise Exception("The current node timed out during startup. This could happen because some of the raylet failed")


@pytest.mark.parametrize(
    ("address", "words"),
    [(None, ["did not start on this host", "very busy"]), ("10.0.0.1:6379", ["RAY_ADDRESS=10.0.0.1:6379", "start one or unset"])],
)
def test_it_is_said_what_does_not_answer_and_why(address: str | None, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", fails)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    else:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SessionError, match="The current node timed out during startup") as refusal, ray_session():
        pytest.fail("there is no session")
    assert all(part in str(refusal.value) for part in words)
