"""Causes of graph breaks are recognized in the words of older versions, which the tests of models meet only there."""

from __future__ import annotations

import pytest

from compile_sweep.schema.causes.breaks import cause_of_break

_UNKNOWN = "This function is either a Python builtin (e.g. _warnings.warn) or a third-party C/C++ Python extension"


@pytest.mark.parametrize(
    ("headline", "explanation", "cause"),
    [
        (
            "Failed to trace builtin operator",
            "Dynamo does not know how to trace builtin operator `hash` with argument types ['Tensor'] (has_kwargs False)",
            "identity of an object",
        ),
        (
            "Failed to trace builtin operator",
            "Dynamo does not know how to trace builtin operator `setattr` with argument types ['type', 'str', 'int']",
            "hooks",
        ),
        (
            "Failed to trace builtin operator",
            "Dynamo does not know how to trace builtin operator `setattr` with argument types ['type', 'str', 'float']",
            "state in a class",
        ),
        (
            "Unsupported method call",
            "Dynamo does not know how to trace method `append` of class `list`",
            "state in a class",
        ),
        (
            "Attempted to call function marked as skipped",
            "Dynamo developers have intentionally marked that the function `copy` in file `copy.py` should not be traced.",
            "copy of a tensor by Python",
        ),
        (
            "Attempted to call function marked as skipped",
            f"Dynamo does not know how to trace the builtin `builtins.__build_class__.` {_UNKNOWN}",
            "class made in the forward",
        ),
        (
            "Unsupported method call",
            "Dynamo does not know how to trace method `__next__` of class `cycle` (cycle)",
            "iterator made outside",
        ),
        (
            "Attempted to inline function marked as skipped",
            "Dynamo developers have intentionally marked that the function `FakeQuantize.forward` should not be traced.",
            "modules of torch.ao",
        ),
        (
            "UnspecializedNNModuleVariable wrapped around ScriptModules unsupported",
            "ScriptModules aren't supported in UnspecializedNNModuleVariable because their .forward isn't static",
            "TorchScript module",
        ),
    ],
)
def test_a_break_has_its_cause_in_the_words_of_older_versions(headline: str, explanation: str, cause: str) -> None:
    found = cause_of_break(f"model.py:3 in forward: {headline}\n  code: y = net(x)\n  explanation: {explanation}")
    assert found is not None
    assert found.name == cause


def test_a_configuration_that_transformers_copies_in_training_has_its_cause() -> None:
    """As of a T5 under transformers 5.17 and torch 2.11; with use_cache=False it is one graph (docs/log.md)."""
    found = cause_of_break(
        "transformers/configuration_utils.py:1361 in get_text_config: copy.deepcopy()\n"
        "  code: config_to_return = copy.deepcopy(config_to_return)\n"
        "  library: transformers\n"
        "  explanation: Dynamo does not support copy.deepcopy() (T5Config)"
    )
    assert found is not None
    assert found.name == "configuration copied in the forward"
