"""Summaries of torch's messages: the right line, no folders of this machine, and limited length."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workloads
from compile_sweep.harness.diagnostics import torch_logs
from compile_sweep.harness.diagnostics.torch_logs import (
    LINE_LENGTH,
    Frame,
    function_name,
    is_torch_internal,
    module_path,
    parse_graph_break,
    parse_hint,
)

TORCH = str(Path(torch.__file__).parent)
PACKAGES = str(Path(torch.__file__).parent.parent)
PROJECT = str(Path(workloads.__file__).parent.parent)
STANDARD = os.path.dirname(os.__file__)

CALLED = [
    Frame(f"{STANDARD}/runpy.py", 88, "run"),
    Frame(f"{PROJECT}/orchestrator/run/worker.py", 70, "_measure"),
    Frame(f"{PROJECT}/compile_sweep/harness/measure.py", 200, "_warm_up"),
    Frame("compile_settings_1a2b.py", 30, "step"),
    Frame(f"{TORCH}/nn/modules/module.py", 1778, "_call_impl"),
]
"""The stack above every model call in a trial."""

OWN = Frame("/home/person/project/model.py", 12, "forward")
BUILT_IN = Frame(f"{PROJECT}/workloads/captioning/model.py", 40, "forward")
LIBRARY = Frame(f"{PACKAGES}/transformers/models/gpt2/modeling_gpt2.py", 300, "forward")
LAYER = Frame(f"{TORCH}/nn/functional.py", 1900, "dropout")
MACHINERY = Frame(f"{TORCH}/optim/optimizer.py", 79, "graph_break")


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([OWN], OWN),
        ([OWN, LAYER], OWN),
        ([OWN, LIBRARY, LAYER], OWN),
        ([BUILT_IN, LIBRARY, MACHINERY], BUILT_IN),
        ([OWN, LIBRARY, Frame("/home/person/project/hook.py", 3, "hook")], Frame("/home/person/project/hook.py", 3, "hook")),
        ([LIBRARY, MACHINERY], LIBRARY),
        ([LIBRARY, LAYER], LAYER),
        ([MACHINERY], None),
        ([], None),
    ],
)
def test_the_users_line_is_the_innermost_of_the_model_and_none_of_the_harness(
    models: list[Frame], expected: Frame | None
) -> None:
    assert torch_logs.find_user_frame([*CALLED, *models]) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (LAYER.path, False),
        (MACHINERY.path, True),
        (f"{TORCH}/nn/parallel/distributed.py", True),
        (f"{STANDARD}/contextlib.py", True),
        (LIBRARY.path, False),
        (OWN.path, False),
    ],
)
def test_machinery_is_what_computes_no_part_of_a_model(path: str, expected: bool) -> None:
    assert is_torch_internal(path) is expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (LIBRARY.path, "transformers/models/gpt2/modeling_gpt2.py"),
        (BUILT_IN.path, "workloads/captioning/model.py"),
        (f"{STANDARD}/contextlib.py", "contextlib.py"),
        ("/srv/venv/lib/python3.12/site-packages/torch/nn/functional.py", "torch/nn/functional.py"),
        (OWN.path, "model.py"),
        ("compile_settings_1a2b.py", "compile_settings_1a2b.py"),
        ("<string>", "<string>"),
    ],
)
def test_a_path_is_as_modules_are_imported(path: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, PROJECT])
    assert module_path(path) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forward", "forward"),
        ("forward@Block", "forward of Block"),
        ("forward@build.<locals>.Block", "forward of build.<locals>.Block"),
        ("loss_of_batch", "loss_of_batch"),
        ("torch_dynamo_resume_in_loss_of_batch_at_9", "loss_of_batch from line 9 on"),
        ("torch_dynamo_resume_in_forward_at_28", "forward from line 28 on"),
        ("torch_dynamo_resume_in_wrapper@ViTLayer_at_9", "wrapper of ViTLayer from line 9 on"),
    ],
)
def test_a_functions_name_is_one_a_person_knows(name: str, expected: str) -> None:
    assert function_name(name) == expected


def test_a_break_inside_a_library_names_the_models_line_and_the_librarys() -> None:
    message = (
        f"Graph break in user code at {LIBRARY.path}:300\n"
        "Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):\n\n"
        "Unsupported method call\n  Explanation: Dynamo does not know this.\n  Hint: Avoid it.\n\n"
        "  Developer debug context: call_method\n\n For more details about this graph break, please visit: a page\n\n"
        "User code traceback:\n"
        f'  File "{PROJECT}/compile_sweep/harness/measure.py", line 200, in _warm_up\n    step(batch)\n'
        f'  File "{OWN.path}", line 12, in forward\n    return self.decoder(x)\n'
        f'  File "{LIBRARY.path}", line 300, in forward\n    cache.update(x)\n'
    )
    assert parse_graph_break(message).text.splitlines() == [
        "model.py:12 in forward: Unsupported method call",
        "  code: return self.decoder(x)",
        "  inside: transformers/models/gpt2/modeling_gpt2.py:300",
        "  library: transformers",
        "  its code: cache.update(x)",
        "  explanation: Dynamo does not know this.",
        "  hint: Avoid it.",
    ]


def test_a_break_reported_again_without_its_stack_is_the_same() -> None:
    again = "(user stack suppressed due to duplicate graph break) "
    first, second = (
        f"Graph break {word}in user code at {OWN.path}:12\nGraph Break Reason: Data-dependent branching\n  Explanation: why\n"
        for word in ("", again)
    )
    assert parse_graph_break(first).key == parse_graph_break(second).key


def test_a_guard_keeps_the_code_it_stems_from_but_not_the_folder_torch_half_cut_off() -> None:
    message = (
        f"Recompiling function forward in {OWN.path}:10\n    triggered by the following guard failure(s):\n"
        "    - 0/1: 2 <= x.size()[0] <= 1024  # if x.size(0) > 1:  # ome/person/project/model.py:12 in forward "
        "(user code shown is first use of this value--the guard itself is not due user code)\n"
        "    - 0/0: tensor 'x' size mismatch at index 0. expected 2, actual 1\n"
    )
    guard = "2 <= x.size()[0] <= 1024 # if x.size(0) > 1: # model.py:12 in forward"
    assert torch_logs.parse_recompile(message) == f"forward (model.py:10): {guard} (one of 2 graphs, none of which fits)"
    for place in ("_dynamo/output_graph.py:3552 in remove_args", "fx/passes/_tensorify_python_scalars.py:429 in _tensorify_impl"):
        internal = f"Recompiling function forward in /a/model.py:10\n  - 0/1: heat == 2.5  # ({place})"
        assert torch_logs.parse_recompile(internal) == "forward (model.py:10): heat == 2.5"


def test_a_long_list_in_a_hint_is_cut_to_its_number() -> None:
    names = ", ".join(f"\"L['self'].param_groups[0]['params'][{index}].grad\"" for index in range(148))
    found = parse_hint(f"Grad tensors [{names}] will be copied; use mark_static_address to elide this copy.")
    assert found == "Grad tensors [148 of them] will be copied; use mark_static_address to elide this copy."


@given(text=st.text() | st.text(alphabet="\n -:()Hint Explanation:'\"/.py0123"))
@settings(deadline=None)
def test_whatever_torch_writes_is_read_and_cut(text: str) -> None:
    found = [
        parse_graph_break(f"Graph Break Reason: {text}").text,
        parse_graph_break(text).text,
        torch_logs.parse_recompile(text),
        torch_logs.parse_recompile_limit(f"hit config.recompile_limit (8)\n{text}") or "",
        torch_logs.parse_not_converted(f"WON'T CONVERT {text}", RuntimeError(text)) or "",
        torch_logs.parse_cudagraph_skip(text),
        torch_logs.parse_outside_cudagraphs(text),
        parse_hint(text * 50),
    ]
    assert all(len(line) <= 2 * LINE_LENGTH + 1 for each in found for line in each.split("\n"))


def test_a_guard_has_the_users_line_and_none_of_torchs() -> None:
    message = (
        "Recompiling function forward@Block in /home/person/model.py:3\n  triggered by the following guard failure(s):\n"
        "  - 0/1: {} # {}"
    )
    own = "parts = torch.split(h, n)  # /home/person/model.py:12 in forward@Block (torch/_dynamo/utils.py:4231 in run_node)"
    for guard, line, expected in (
        ("___stack2[5] == 1", "(_prims_common/__init__.py:285 in check_contiguous)", "___stack2[5] == 1"),
        ("n == 1", own, "n == 1 # parts = torch.split(h, n) # model.py:12 in forward of Block"),
    ):
        text = torch_logs.parse_recompile(message.format(guard, line))
        assert text == f"forward of Block (model.py:3): {expected}"
