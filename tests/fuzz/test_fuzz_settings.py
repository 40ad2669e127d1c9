"""Settings from untrusted text and JSON: one sentence or a value, and nothing in them ever becomes code."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from fuzzing import HOSTILE, PLANTED, nested, nothing_runs, said, spliced, texts, thoroughly, values
from hypothesis import given
from hypothesis import strategies as st

from compile_sweep.contract.installed_torch import LoadedTorch, refuse_unknown_names
from compile_sweep.harness.source import Facts, to_source
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.part_settings import PartSettings
from compile_sweep.schema.settings import CompileSettings, Dynamic, Mode, Scope

FIELDS = list(CompileSettings.__dataclass_fields__)
DOTTED = [
    "inductor.",
    "options.",
    "workload.",
    "parts.",
    "parts.encoder.",
    "parts.encoder.mode",
    "workload.batch_size",
    "inductor.max_fusion_size",
    "inductor.epilogue_fusion",
    "ddp.",
    "ddp.bucket_cap_mb",
]
PROPER = [
    *Scope,
    *Mode,
    *Dynamic,
    "on",
    "off",
    "1",
    "8",
    "32/64/256",
    "bf16",
    "sdpa",
    "fused",
    "eager",
    "inductor",
    "max",
    "longest",
]

names = st.sampled_from([*FIELDS, *DOTTED]) | texts
worth = st.sampled_from(PROPER) | values
fields = st.dictionaries(names, worth, max_size=6)
words = spliced([*(f"{name}=" for name in (*FIELDS, *DOTTED)), *PROPER, ",", "=", "."])

FACTS = Facts(
    workload="Fuzzed",
    device_type="cpu",
    torch_version=(2, 13),
    max_length=256,
    targets={"": {"ids": (1,)}, "encoder": {}, "decoder": {"ids": (1,)}, "loss": {}},
    autocast="bfloat16",
    attention=None,
)


def checked(settings: CompileSettings) -> None:
    """Checks invariants of any accepted settings."""
    assert CompileSettings.parse(settings.key) == settings
    assert CompileSettings.from_dict(settings.to_dict()) == settings
    assert CompileSettings.from_dict(json.loads(json.dumps(settings.to_dict(), allow_nan=False))) == settings
    assert hash(settings) == hash(CompileSettings.parse(settings.key))
    assert settings.key.isprintable()
    assert isinstance(settings.label, str)
    settings.eager_counterpart()


@thoroughly
@given(words)
def test_text_is_settings_or_one_sentence(text: str) -> None:
    with nothing_runs():
        try:
            found = CompileSettings.parse(text)
        except SettingsError as error:
            said(error)
        else:
            checked(found)


@thoroughly
@given(fields)
def test_json_is_settings_or_one_sentence(given_fields: dict[str, Any]) -> None:
    with nothing_runs():
        try:
            found = CompileSettings.from_dict(given_fields)
        except SettingsError as error:
            said(error)
        else:
            checked(found)


@thoroughly
@given(st.dictionaries(st.sampled_from(["mode", "dynamic", "compile"]) | texts, worth, max_size=3))
def test_a_part_is_settings_or_one_sentence(of_part: dict[str, Any]) -> None:
    with nothing_runs():
        try:
            found = CompileSettings.from_dict({"scope": "modular", "parts": {"encoder": of_part}})
        except SettingsError as error:
            said(error)
        else:
            checked(found)
            assert all(isinstance(part, PartSettings) for _, part in found.parts or ())


@thoroughly
@given(
    st.builds(
        lambda base, options, workload, backend: {**base, "options": options, "workload": workload, **backend},
        st.sampled_from([{"scope": "full"}, {"scope": "modular"}, {"scope": "full", "dynamic": "mark", "dynamic_min": 2}]),
        st.dictionaries(st.sampled_from(["max_fusion_size", "epilogue_fusion"]) | texts, st.booleans() | texts, max_size=3),
        st.dictionaries(texts, st.booleans() | texts, max_size=2),
        st.sampled_from([{}, {}]) | st.builds(lambda name: {"backend": name, "options": None}, texts),
    )
)
def test_source_is_python_in_which_settings_are_only_values(given_fields: dict[str, Any]) -> None:
    """The source is executed: everything in a setting must end up in a string, never next to one."""
    try:
        settings = CompileSettings.from_dict(given_fields)
        source = to_source(settings, FACTS)
    except SettingsError as error:
        return said(error)
    for node in ast.walk(ast.parse(source)):
        named = [getattr(node, attribute, None) for attribute in ("id", "attr", "name", "arg", "module")]
        assert not [name for name in named if isinstance(name, str) and PLANTED in name], source
    return None


@thoroughly
@given(texts, texts)
def test_names_that_torch_does_not_know_are_refused_before_anything_is_executed(option: str, backend: str) -> None:
    for known in ("inductor.max_fusion_size=8", "backend=eager"):
        refuse_unknown_names(CompileSettings.parse(known), LoadedTorch())  # torch imports the sources of some names at first use
    for given_fields in ({"options": {option: 1}}, {"backend": backend}):
        try:
            settings = CompileSettings.from_dict(given_fields)
        except SettingsError as error:
            said(error)
            continue
        if settings.options or settings.backend:
            with nothing_runs(), pytest.raises(SettingsError, match=r"no option|no backend"):
                refuse_unknown_names(settings, LoadedTorch())


@pytest.mark.parametrize("text", [nested(100_000), nested(100_000, '{"a":', "}"), *HOSTILE])
def test_what_is_special_is_tried_in_every_field(text: str) -> None:
    for name in (*FIELDS, *DOTTED):
        for spelled in (f"{name}={text}", f"scope=modular,{name}={text}"):
            try:
                checked(CompileSettings.parse(spelled))
            except SettingsError as error:
                said(error)
