"""torch's process-wide state about the reduction of gradients: what settings may change of it is put back here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel

from workloads.ddp import DdpSettings
from workloads.errors import SettingsError

_WRAPPERS_MODULE = "torch.nn.parallel.distributed"


@contextmanager
def reducing_put_back() -> Iterator[None]:
    """Puts back what the block changes, and what `DistributedDataParallel` itself changes under optimize_ddp=python_reducer."""
    dynamo, inductor, trace_rules = torch._dynamo.config, torch._inductor.config, torch._dynamo.trace_rules
    with (
        dynamo.patch(optimize_ddp=dynamo.optimize_ddp, compiled_autograd=dynamo.compiled_autograd),
        inductor.patch(
            _fuse_ddp_communication=inductor._fuse_ddp_communication, _fuse_ddp_bucket_size=inductor._fuse_ddp_bucket_size
        ),
    ):
        was_traced = _WRAPPERS_MODULE in trace_rules.LEGACY_MOD_INLINELIST
        try:
            yield
        finally:
            if not was_traced and _WRAPPERS_MODULE in trace_rules.LEGACY_MOD_INLINELIST:
                trace_rules.LEGACY_MOD_INLINELIST.discard(_WRAPPERS_MODULE)
                trace_rules.get_legacy_mod_inlinelist.cache_clear()


@contextmanager
def reducing_as_usual() -> Iterator[None]:
    """Torch's own reducer for what is wrapped inside the block, whatever settings are in force around it.

    An eager reference is wrapped while the run under test is, and `DistributedDataParallel` asks for its reducer only then.
    """
    with torch._dynamo.config.patch(optimize_ddp=True, compiled_autograd=False):
        yield


def refuse_unknown_arguments(ddp: DdpSettings | None) -> None:
    """Refuses what the installed `DistributedDataParallel` cannot do.

    Raises:
        SettingsError: it does not take the argument.
    """
    taken = inspect.signature(DistributedDataParallel.__init__).parameters
    if ddp is not None and ddp.batched_grad_copy and "batched_grad_copy" not in taken:
        raise SettingsError(f"ddp.batched_grad_copy is there from torch 2.12 on, and this is {torch.__version__}; leave it out")
