"""Tells whether an exception comes from the compiler or from the code that it compiles."""

import sys
import traceback

from compile_sweep.schema.causes.errors import GRAPHS_MEMORY, SECOND_BACKWARD, WRONG_FAKE

_COMPILERS = ("torch/_dynamo/", "torch/_functorch/_aot_autograd/", "torch/_inductor/", "torch/fx/experimental/")
"""Modules that raise their own errors: AOTAutograd and Inductor at run time, such as the one about second derivatives, and
symbolic shapes, whose violated constraints Dynamo does not wrap.
"""


_GENERATED = "torch._inductor.runtime.compile_tasks."  # what Inductor calls the modules that it generates


def is_compiler_error(error: BaseException) -> bool:
    """Tells whether the compiler raised the error, while it compiled or while its code ran."""
    dynamo = sys.modules.get("torch._dynamo.exc")  # if it is not loaded, nothing was compiled
    if dynamo is not None and isinstance(error, dynamo.TorchDynamoException | dynamo.FailOnRecompileLimitHit):
        return True
    if isinstance(error, RuntimeError) and GRAPHS_MEMORY in str(error):  # raised by whatever operator reads the tensor
        return True
    if isinstance(error, AssertionError) and WRONG_FAKE in str(error):
        return True
    if not isinstance(error, RuntimeError | AssertionError | TypeError) or SECOND_BACKWARD in str(error):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and frames[-1].f_globals.get("__name__", "").startswith(_GENERATED):
        return type(error).__name__ != "_LinAlgError"  # of what a matrix holds, also in eager code
    if isinstance(error, TypeError):  # also raised where compiled code is called with wrong arguments
        return False
    files = [frame.f_code.co_filename for frame in frames]
    raising = [file for file in files if not file.endswith("torch/__init__.py")]  # which has torch._check
    return bool(raising) and any(folder in raising[-1] for folder in _COMPILERS)
