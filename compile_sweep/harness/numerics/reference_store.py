"""Eager runs that a sweep's trials share: made by the first trial that needs them and kept in the sweep's folder for later ones.

Background: the runs that a compiled run is judged by depend on the workload, its batches and the precision, not on how anything
is compiled. A trial still makes eager run A itself, because the eager steps timed beside the compiled ones need that model at the
same step. The run also shows whether the kept ones are of this training: its weights, losses and first update must be theirs. If
they are not, or there are none, or several workers train together, the trial makes all runs. Output: `References`, kept or new.
"""

import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from compile_sweep.contract.base import Batch, Workload
from compile_sweep.harness.distributed import num_workers
from compile_sweep.harness.numerics.references import References
from compile_sweep.harness.numerics.trajectory import Trajectory
from compile_sweep.harness.prepare import Prepared
from compile_sweep.schema.journal import written_whole

SAME_LOSS = 1e-5
"""Relative difference of two eager runs' first losses, up to which they are of the same weights and batch. Eager forwards repeat
exactly, but for a few operators on GPUs that add in any order."""

SAME_TRAINING = 1e-3
"""The same for their later losses and for the size of their first update, which another learning rate would change."""

SAME_WEIGHTS = 1e-6  # the same for the norms of their starting weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStore:
    """The eager runs of a sweep.

    One trial's process may write while others read: files appear whole, under names that say what their runs are of.
    """

    folder: Path  # created if it is missing, in a folder that exists

    def load(self, prepared: Prepared, batches: Sequence[Batch], eager: Trajectory) -> References | None:
        """Returns the kept runs that a trial would make itself, with its own run A; None if there are none."""
        if num_workers() > 1:
            return None
        try:
            kept = torch.load(self._path(prepared, batches), weights_only=True)
            first, *permuted = (Trajectory(**one) for one in kept["eager"])
            precise = Trajectory(**kept["precise"])
        except Exception:  # there is none, or torch cannot read it, which may raise anything
            return None
        if not is_same_run(first, eager):
            return None
        return References(
            eager=eager,
            permuted=permuted,
            precise=precise,
            precise_dtype=kept["precise_dtype"],
            rounding=kept["rounding"],
            perturbed=[Trajectory(**one) for one in kept["perturbed"]],
        )

    def save(self, prepared: Prepared, batches: Sequence[Batch], references: References) -> None:
        """Keeps runs for later trials, if they are complete; what cannot be written is not kept."""
        if num_workers() > 1 or references.precise is None:
            return
        runs = [one.to_dict() for one in (references.eager, *references.permuted)]
        kept = {
            "eager": runs,
            "precise": references.precise.to_dict(),
            "precise_dtype": references.precise_dtype,
            "rounding": references.rounding,
            "perturbed": [one.to_dict() for one in references.perturbed],
        }
        with suppress(Exception):  # a full disk, or tensors without plain bytes
            path = self._path(prepared, batches)
            self.folder.mkdir(exist_ok=True)  # but not the sweep's folder, which someone may have removed
            with written_whole(path) as unfinished:
                torch.save(kept, unfinished)

    def _path(self, prepared: Prepared, batches: Sequence[Batch]) -> Path:
        digest = hashlib.sha256()
        for part in _identity(prepared, batches):
            digest.update(part)
            digest.update(b"\0")
        return self.folder / digest.hexdigest()[:32]


def is_same_run(kept: Trajectory, made: Trajectory) -> bool:
    """Returns whether two eager runs are of one training: equal weights and first losses, then as close as repeated runs are."""
    if not kept.losses or len(kept.losses) != len(made.losses) or kept.start_norms.keys() != made.start_norms.keys():
        return False
    if (kept.random, kept.weights, len(kept.outputs)) != (made.random, made.weights, len(made.outputs)):
        return False
    norms = ((norm, made.start_norms[name]) for name, norm in kept.start_norms.items())
    starts_alike = all(math.isclose(one, other, rel_tol=SAME_WEIGHTS) for one, other in norms)
    later = [(kept.losses, made.losses), *((sizes[:1], made.updates[name][:1]) for name, sizes in kept.updates.items())]
    return (
        starts_alike
        and math.isclose(kept.losses[0], made.losses[0], rel_tol=SAME_LOSS)
        and all(math.isclose(*pair, rel_tol=SAME_TRAINING) for series in later for pair in zip(*series, strict=True))
    )


def _identity(prepared: Prepared, batches: Sequence[Batch]) -> Iterator[bytes]:
    """Yields all that eager runs depend on."""
    workload, device = prepared.workload, prepared.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    for text in (
        f"torch {torch.__version__}",
        f"{type(workload).__module__}:{type(workload).__qualname__} {workload.size} {workload.seed}",
        repr(sorted(workload.chosen.items())),
        f"{prepared.settings.eager_counterpart().key} {prepared.settings.float8}",  # which sets the rounding that is allowed
        f"{name} {workload.autocast_dtype(device)} {workload.learning_rate}",
    ):
        yield text.encode()
    yield _code_of(workload)
    for batch in batches:
        for tensor_name, tensor in sorted(batch.inputs.items()):
            yield f"{tensor_name} {tensor.dtype} {tuple(tensor.shape)}".encode()
            yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _code_of(workload: Workload) -> bytes:
    """Returns the text of the workload's module, which may change between two runs of a sweep."""
    path = getattr(sys.modules.get(type(workload).__module__), "__file__", None)
    return Path(path).read_bytes() if path and Path(path).is_file() else b""
