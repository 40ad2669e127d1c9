"""Whose an exception is: the compiler's, or that of the code it compiles."""

from __future__ import annotations

import sys
import traceback

_COMPILERS = ("torch/_dynamo/", "torch/_functorch/_aot_autograd/", "torch/_inductor/")
"""Where AOTAutograd and Inductor raise errors of their own at run time, such as that no second derivative is possible."""


def is_compiler_error(error: BaseException) -> bool:
    """Whether the compiler raised it, while it compiled or while its code ran."""
    dynamo = sys.modules.get("torch._dynamo.exc")  # nothing was compiled if it is not loaded
    if dynamo is not None and isinstance(error, dynamo.TorchDynamoException):
        return True
    if not isinstance(error, RuntimeError) or error.__traceback__ is None:
        return False
    *_, innermost = traceback.walk_tb(error.__traceback__)
    return any(folder in innermost[0].f_code.co_filename for folder in _COMPILERS)
