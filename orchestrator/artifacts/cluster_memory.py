"""The in-cluster tier: an actor on the head keeps contents in Ray's object store, in front of a durable shelf.

Every content is written to the durable shelf before a publish ends. When memory exceeds its bound, the contents that were unused
longest are dropped; they are read from the durable shelf again when needed, and so is everything after the actor died. The
contents of one publish become one object, because hundreds of small objects cost as many round trips. An object dies with its
owner, so the actor puts objects, never a trial.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from compile_sweep.schema.errors import CacheError
from orchestrator.artifacts.object_store import TIMEOUT_S, DurableShelf, normalized
from orchestrator.artifacts.shelf import BlobInfo, Blobs, Use
from orchestrator.cluster import head_actors
from orchestrator.guard.watchdog import ATTEMPT_MARKER

MEMORY_BYTES = 2**30
"""Maximum that the actor holds, in bytes. Ray spills to disk where a host's object store is smaller."""

Slab = NDArray[np.uint8]
"""Concatenated contents. A numpy array, because readers on the actor's host then share its memory; bytes would be copied."""

Span = tuple[int, int]  # offset and length of a content in its slab, in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where to read contents from."""

    slabs: tuple[ray.ObjectRef[Slab], ...]
    places: dict[str, tuple[int, Span]]  # index of the slab and span in it, by digest
    failed: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Held:
    slab: ray.ObjectRef[Slab]
    size_bytes: int
    spans: dict[str, Span]


class CacheHolder(DurableShelf):
    """The actor: a durable shelf whose contents it also holds. Ray calls it from several threads; others use `ClusterShelf`."""

    def __init__(self, location: str, memory_bytes: int) -> None:
        super().__init__(location)
        self._memory_bytes = memory_bytes
        self._held: OrderedDict[int, _Held] = OrderedDict()  # longest unused first
        self._home: dict[str, int] = {}
        self._next = 0
        self._lock = threading.Lock()

    def put_slab(self, slab: Slab, spans: dict[str, Span]) -> None:
        """Stores concatenated contents."""
        self.put_blobs({digest: slab[at : at + length].tobytes() for digest, (at, length) in spans.items()})
        self._hold(slab, spans)

    def locate(self, sizes: Mapping[str, int]) -> Located:
        """Returns where contents are in memory, after reading those that are not from the durable shelf."""
        with self._lock:
            used = list(dict.fromkeys(self._home[digest] for digest in sizes if digest in self._home))
            for number in used:
                self._held.move_to_end(number)
            found = [self._held[number] for number in used]
        places = {digest: (number, span) for number, held in enumerate(found) for digest, span in held.spans.items()}
        absent = {digest: size for digest, size in sizes.items() if digest not in places}
        slabs = [held.slab for held in found]
        failed: dict[str, str] = {}
        if absent:
            blobs = self.get_blobs(absent)
            failed = blobs.failed
            if blobs.found:
                slab, spans = laid_out(blobs.found)
                places |= {digest: (len(slabs), span) for digest, span in spans.items()}
                slabs.append(self._hold(slab, spans))
        return Located(slabs=tuple(slabs), places={digest: places[digest] for digest in sizes if digest in places}, failed=failed)

    def drop_blobs(self, digests: Iterable[str]) -> None:
        dropped = list(digests)
        with self._lock:
            for number in {self._home[digest] for digest in dropped if digest in self._home}:
                self._forget(number)  # the slab's other contents are read from the durable shelf again
        super().drop_blobs(dropped)

    def process_id(self) -> int:
        """Returns the actor's process ID on its host."""
        return os.getpid()

    def held_bytes(self) -> int:
        """Returns how many bytes memory holds now."""
        with self._lock:
            return sum(held.size_bytes for held in self._held.values())

    def _hold(self, slab: Slab, spans: dict[str, Span]) -> ray.ObjectRef[Slab]:
        reference = ray.put(slab)
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._held[number] = _Held(reference, slab.nbytes, spans)
            self._home |= dict.fromkeys(spans, number)
            while sum(held.size_bytes for held in self._held.values()) > self._memory_bytes:
                self._forget(next(iter(self._held)))
        return reference

    def _forget(self, number: int) -> None:
        held = self._held.pop(number)
        for digest in held.spans:
            if self._home.get(digest) == number:
                del self._home[digest]


class ClusterShelf:
    """A `Shelf` in the cluster's memory, in front of a durable one; usable from any process of a running Ray session.

    Args:
        location: Folder or URI of the durable shelf, as the actor's host reaches it.
        memory_bytes: Maximum that the actor holds, in bytes; ignored if the actor runs already.
    """

    def __init__(self, location: str, memory_bytes: int = MEMORY_BYTES) -> None:
        self._uri = normalized(location)
        self._memory_bytes = memory_bytes
        self._location = DurableShelf(self._uri).location

    @property
    def location(self) -> str:
        return self._location

    def present(self, sizes: Mapping[str, int]) -> set[str]:
        return cast(set[str], self._ask("present", dict(sizes)))

    def put_blobs(self, blobs: Mapping[str, bytes]) -> None:
        self._ask("put_slab", *laid_out(blobs))

    def get_blobs(self, sizes: Mapping[str, int]) -> Blobs:
        for is_last in (False, True):
            located = cast(Located, self._ask("locate", dict(sizes)))
            try:
                slabs: Sequence[Slab] = ray.get(list(located.slabs), timeout=TIMEOUT_S)
            except ObjectLostError as error:  # the actor died in between; its successor has the contents
                if is_last:
                    raise self._unusable(error) from None
            except RayError as error:
                raise self._unusable(error) from None
            else:
                break
        found = {digest: slabs[n][at : at + length].tobytes() for digest, (n, (at, length)) in located.places.items()}
        return Blobs(found=found, failed=located.failed)

    def drop_blobs(self, digests: Iterable[str]) -> None:
        self._ask("drop_blobs", list(digests))

    def blobs(self) -> dict[str, BlobInfo]:
        return cast(dict[str, BlobInfo], self._ask("blobs"))

    def put_manifest(self, name: str, text: bytes) -> None:
        self._ask("put_manifest", name, text)

    def manifests(self) -> dict[str, bytes]:
        return cast(dict[str, bytes], self._ask("manifests"))

    def drop_manifests(self, names: Iterable[str]) -> None:
        self._ask("drop_manifests", list(names))

    def note_hits(self, hits: Mapping[str, int]) -> None:
        self._ask("note_hits", dict(hits))

    def uses(self) -> dict[str, Use]:
        return cast(dict[str, Use], self._ask("uses"))

    def holder(self) -> ActorHandle[CacheHolder]:
        """Returns the actor, started if there is none. It outlives trial and driver, and Ray restarts it if it dies."""
        actor = ray.remote(num_cpus=0, resources=head_actors.HEAD_CLAIM)(CacheHolder)
        options = actor.options(
            name=f"compile-sweep-cache-{hashlib.sha256(self._uri.encode()).hexdigest()[:12]}",
            namespace=head_actors.NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=8,
            # The first caller may be a trial's worker, whose placement group has no room and ends, and whose reaper kills every
            # process that carries its marker.
            scheduling_strategy="DEFAULT",
            runtime_env={"env_vars": {ATTEMPT_MARKER: ""}},
        )
        return cast("ActorHandle[CacheHolder]", options.remote(self._uri, self._memory_bytes))

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self.holder(), method).remote(*arguments), timeout=2 * TIMEOUT_S)
        except RayTaskError as error:
            if isinstance(error.cause, CacheError):
                raise CacheError(str(error.cause)) from None
            raise self._unusable(error) from None
        except RayError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: RayError) -> CacheError:
        words = " ".join(str(error).split())[:200]
        return CacheError(f"the cluster's cache before {self._location} cannot be used: {type(error).__name__}: {words}")


def laid_out(blobs: Mapping[str, bytes]) -> tuple[Slab, dict[str, Span]]:
    """Concatenates contents; returns the slab and each content's span."""
    spans: dict[str, Span] = {}
    end = 0
    for digest, content in blobs.items():
        spans[digest] = (end, len(content))
        end += len(content)
    return np.frombuffer(b"".join(blobs.values()), dtype=np.uint8), spans
