"""Caches of keys and values, which models of transformers make while they train: found, and left out where a setting says so."""

from __future__ import annotations

import sys

import pytest

from compile_sweep.script import session_results
from tests.scripts.conftest import Run

pytestmark = pytest.mark.slow

AOT = "scope=full,dynamic=auto,backend=aot_eager"


def test_a_cache_that_training_makes_is_found_and_left_out_where_settings_say_so(run: Run) -> None:
    losses = []
    for settings in ("scope=eager,as_written=on", "scope=eager,use_cache=off", f"{AOT},use_cache=off"):
        session, error = run("seq2seq.py", settings)
        assert error is session.error is None
        assert session_results.model_facts(session)["makes_cache"] is True, "found before any setting is applied"
        script = vars(sys.modules["__main__"])
        assert script["caches"][0], "the steps of the discovery are the script's own"
        assert script["caches"][-1] is not ("use_cache=off" in settings)
        assert all(script["saved"]), "checkpoints have the script's configuration"
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
        if AOT in settings:
            assert session_results.measurement(session).fallbacks == []
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_a_script_that_asks_for_the_cache_in_its_call_gets_it(run: Run) -> None:
    session, error = run("seq2seq.py", "scope=eager,use_cache=off", "--with-cache")
    assert error is session.error is None
    assert all(vars(sys.modules["__main__"])["caches"])


def test_a_model_without_one_is_told_apart(run: Run) -> None:
    session, error = run("plain_loop.py", "scope=eager,as_written=on")
    assert error is session.error is None
    assert session_results.model_facts(session)["makes_cache"] is False
