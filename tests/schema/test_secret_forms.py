"""Secrets are found by the forms in which services, programs and people write them; ordinary text stays as it is."""

from __future__ import annotations

import json
import random
import time

import pytest
from secret_forms import ORDINARY, made_up

from compile_sweep.schema.redact import redact_json, redact_text


@pytest.mark.parametrize("form", made_up(0))
def test_a_secret_is_found_by_its_form_wherever_it_stands(form: str) -> None:
    for seed in range(5):
        text, secret = made_up(seed)[form]
        for said in (text, f"it said {text} and went on", f"before\n{text}\nafter", f"RuntimeError('{text}')"):
            assert secret not in redact_text(said, {})
        assert secret not in json.dumps(redact_json({"reasons": [text], text: 1}, {}))


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays(text: str) -> None:
    for said in (text, f"it said {text} and went on", f"before\n{text}\nafter", f"[{text}]"):
        assert redact_text(said, {}) == said


def test_ordinary_text_stays_beside_secrets() -> None:
    dice = random.Random(1)
    for text, secret in made_up(1).values():
        plain = dice.choice(ORDINARY)
        cleared = redact_text(f"{plain}\n{text}\n{plain}", {})
        assert cleared.startswith(f"{plain}\n")
        assert cleared.endswith(f"\n{plain}") or "PRIVATE KEY" in text  # a key without its end goes on to the end of the text
        assert secret not in cleared


@pytest.mark.parametrize(
    "text",
    ["a1-_" * 50_000, "password=a1" * 20_000, "eyJa1." * 30_000, "curl " * 40_000, "wandb login -x " * 14_000, "M" * 200_000],
)
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()
    redact_text(text, {})
    assert time.process_time() - began < 5  # some 0.1 s; a search whose time grows with the square of the length takes minutes
