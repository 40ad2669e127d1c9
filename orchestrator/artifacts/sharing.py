"""What a worker does with artifacts of other trials: restores some before it measures, publishes its own afterwards.

Both happen outside the timed windows, and neither can end a trial: a failure becomes a sentence in the trial's log, and missing
artifacts are compiled.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.schema.errors import CacheError
from compile_sweep.schema.record import Caches
from compile_sweep.schema.redact import redact_text
from orchestrator.artifacts import Facts, Manifest, Selection, SigningKey, open_store, select, trial_facts
from orchestrator.config import HIDDEN, REDIS, shown
from orchestrator.run.trial_spec import Assignment

if TYPE_CHECKING:
    from compile_sweep.contract.base import Workload  # loads torch, like the modules of workloads imported below
    from compile_sweep.harness.compile_cache.transfer import CacheUsage
    from compile_sweep.harness.warm_start import Start
    from compile_sweep.schema.record import Measurement

RESTORE_LIMIT_S = 120.0
"""Seconds after which a trial continues without artifacts; longer than most compiles that artifacts would save."""

PUBLISH_LIMIT_S = 120.0  # seconds after which a trial ends without having published
_SPARE_S = 5.0  # seconds of the trial's time that are reserved for what follows

Result = TypeVar("Result")
Name = tuple[str, str]  # kind and key of an artifact


@dataclass(slots=True)
class _Restored:
    artifacts: Sequence[Artifact] = ()
    selection: Selection | None = None
    own: frozenset[str] = frozenset()  # IDs of manifests with the same settings
    refused: int = 0
    seconds: float = 0.0

    @property
    def size_bytes(self) -> int:
        return sum(len(artifact.content) for artifact in self.artifacts)


@dataclass(slots=True)
class Sharing:
    """Restores and publishes artifacts for one worker and assignment; a script has no workload. Needs torch."""

    assignment: Assignment
    workload: Workload | None
    rank: int
    _facts: Facts = field(default_factory=dict, init=False)
    _restored: _Restored | None = field(default=None, init=False)
    _use: CacheUsage | None = field(default=None, init=False)
    _bundle: bytes | None = field(default=None, init=False)  # what torch compiled in a script's process
    _faults: list[str] = field(default_factory=list, init=False)  # a sentence for each thing that failed

    def restore(self, seconds_left: float) -> None:
        """Restores artifacts that may help, if the trial starts with any. Call it before anything is compiled."""
        if not (self.assignment.compiles and self._has_store):
            return
        began = time.perf_counter()
        try:
            from compile_sweep.harness.compile_cache.transfer import torch_configuration

            with nullcontext() if self.workload is None else self.workload.process_settings():
                self._facts = trial_facts(torch_configuration(), self.assignment.settings, use_gpu=self.assignment.plan.use_gpu)
            if self.assignment.plan.script is not None:
                self._facts["script"] = _identity(self.assignment.plan.script)
            if not self.assignment.restores:
                return
            self._restored = _Restored()
            self._restored = _within(min(RESTORE_LIMIT_S, seconds_left - _SPARE_S), self._fetch)
            from compile_sweep.harness.compile_cache.transfer import CacheFolders, restore_artifacts

            restore_artifacts(self._restored.artifacts, CacheFolders.of_process())
        except Exception as error:  # whatever failed, the compiler can work without it
            self._fault(f"restoring from {shown(str(self.assignment.plan.cache))} failed: {_sentence(error)}")
        if self._restored is not None:
            self._restored.seconds = time.perf_counter() - began
            count = len(self._restored.artifacts)
            print(f"restored {count} artifacts, {self._restored.size_bytes} bytes, in {self._restored.seconds:.2f} s", flush=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts the compiler's cache hits and misses while the block lasts."""
        with ExitStack() as watch:
            if self.assignment.compiles:
                try:
                    from compile_sweep.harness.compile_cache.transfer import enable_precompile, watch_caches

                    watch.enter_context(enable_precompile(self.assignment.plan.precompile))
                    if self._is_redis:
                        watch.enter_context(self._reaching_redis())
                    restored = self._restored.artifacts if self._restored else ()
                    self._use = watch.enter_context(watch_caches(restored))
                except Exception as error:  # a version of torch with other caches
                    print(f"caches are not watched: {_sentence(error)}", flush=True)
            yield

    @property
    def watched(self) -> Sequence[Artifact] | None:
        """Artifacts that a script's process starts with; None if nothing is to be known of its caches."""
        if not self._facts:
            return None
        return self._restored.artifacts if self._restored else ()

    def take(self, use: Mapping[str, Any], bundle: bytes) -> None:
        """Takes over what a script's process reported about its caches, and what it compiled."""
        from compile_sweep.harness.compile_cache.usage import CacheUsage

        self._use, self._bundle = CacheUsage.from_dict(use), bundle

    def publish(self, seconds_left: float) -> dict[str, Any]:
        """Publishes what this process made, if it has rank 0; returns figures for the record."""
        if self.rank != 0 or not self._facts:
            return {}
        began = time.perf_counter()
        try:
            from compile_sweep.harness.compile_cache.transfer import CacheFolders, enable_precompile, gather_artifacts

            restored = self._restored.artifacts if self._restored else ()
            folders, use = CacheFolders.of_process(), self._use
            with enable_precompile(self.assignment.plan.precompile):
                gathered = [] if self.assignment.plan.warm_start else gather_artifacts(folders, use, restored, self._bundle)
            artifacts = [artifact for artifact in gathered if self._is_worth_naming(artifact)]
            left = seconds_left - _SPARE_S - (time.perf_counter() - began)
            figures = _within(min(PUBLISH_LIMIT_S, left), lambda: self._put(artifacts))
        except Exception as error:  # the trial's measurement stays valid
            self._fault(f"published nothing in {shown(str(self.assignment.plan.cache))}: {_sentence(error)}")
            return {"cache_faults": self._faults}
        if figures:
            print("published " + ", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
            figures["publish_s"] = time.perf_counter() - began
        return figures

    def figures(self, measured: Measurement | Start | Mapping[str, Any]) -> dict[str, Any]:
        """Returns figures about this worker's caches for the record."""
        use, restored = self._use, self._restored
        found: dict[str, Any] = {"cache_faults": self._faults}
        if use is not None:
            found |= {"cache_hits": sum(use.hits.values()), "cache_misses": sum(use.misses.values())}
        if restored is not None:
            found |= {
                "restore_s": restored.seconds,
                "cache_restored": len(restored.artifacts),
                "cache_restored_bytes": restored.size_bytes,
                "cache_refused": restored.refused,
            }
        is_warm = self._is_redis if restored is None else bool(restored.artifacts) or self._others_may_have
        saved_s = use.saved_s if use is not None and is_warm else None
        found |= {"caches": str(Caches.WARM if is_warm else Caches.COLD), "cache_saved_s": saved_s}
        values = measured if isinstance(measured, Mapping) else measured.to_dict()
        if self.assignment.plan.warm_start:
            return {**found, "warm_start_s": found.get("restore_s", 0.0) + values["load_s"] + values["warmup_s"]}
        return {**found, "cold_equivalent_s": None if saved_s is None else values["compile_s"] + saved_s}

    def _fault(self, sentence: str) -> None:
        print(sentence, flush=True)
        self._faults.append(sentence)

    @property
    def _address(self) -> str:
        """Returns where the artifacts are, with the credentials that plans leave out."""
        address = str(self.assignment.plan.cache)
        if HIDDEN not in address:
            return address
        from orchestrator.cluster.head_actors import with_credentials  # loads ray

        return with_credentials(address)

    @property
    def _has_store(self) -> bool:
        cache = self.assignment.plan.cache
        return cache is not None and not cache.startswith(REDIS)

    @property
    def _is_redis(self) -> bool:
        return self.assignment.restores and not self._has_store

    @property
    def _others_may_have(self) -> bool:
        """Tells whether another worker on the host, which shares its caches, may have restored what this one could not."""
        chosen = self._restored.selection if self._restored else None
        return self.assignment.plan.num_workers > 1 and (chosen is None or bool(chosen.entries))

    @contextmanager
    def _reaching_redis(self) -> Iterator[None]:
        """Lets torch use the server, and makes this process accept only values signed with our key."""
        from compile_sweep.harness.compile_cache.redis import sealed_redis
        from orchestrator.artifacts.redis import URL_VARIABLE, environment_for

        address = environment_for(self._address)[URL_VARIABLE]
        with sealed_redis(SigningKey.load(), address, self._fault) as refused:
            try:
                yield
            finally:
                if refused:
                    print(f"refused: {len(refused)} values on the Redis server that our key has not signed", flush=True)

    def _fetch(self) -> _Restored:
        plan, key = self.assignment.plan, self.assignment.settings.key
        environment = self._manifest().environment
        store = open_store(self._address, in_cluster=plan.cache_in_cluster)
        listing = store.manifests()
        mine = [manifest for manifest in listing.manifests if manifest.settings_key == key]
        selection = select(
            mine if plan.warm_start else listing.manifests,
            environment=environment,
            workload=plan.workload,
            size=plan.size,
            settings_key=key,
        )
        fetched = store.fetch(selection.entries, environment)
        for sentence in (*listing.refused, *fetched.refused):
            print(f"refused: {sentence}", flush=True)
        return _Restored(
            artifacts=fetched.artifacts,
            selection=selection,
            own=frozenset(manifest.id for manifest in mine),
            refused=len(listing.refused) + len(fetched.refused),
        )

    def _put(self, artifacts: Sequence[Artifact]) -> dict[str, Any]:
        store = open_store(self._address, in_cluster=self.assignment.plan.cache_in_cluster)
        if self._restored is not None and self._restored.selection is not None:
            try:
                store.note_hits(self._restored.selection.hits(self._hit_names()))
            except CacheError as error:  # `gc` may then remove artifacts that are in use; publishing the new ones matters more
                print(f"hits are not noted: {_sentence(error)}", flush=True)
        if not artifacts:
            return {}
        published = store.publish(self._manifest(), artifacts)
        return {
            "cache_made": len(published.manifest.entries),
            "cache_made_bytes": published.all_bytes,
            "cache_new_bytes": published.new_bytes,
        }

    def _manifest(self) -> Manifest:
        plan = self.assignment.plan
        return Manifest(
            facts=self._facts,
            workload=plan.workload,
            size=plan.size,
            settings_key=self.assignment.settings.key,
            maker=self.assignment.trial_id,
        )

    def _is_worth_naming(self, artifact: Artifact) -> bool:
        """Tells whether the artifact belongs to this setting, rather than having been restored and not used."""
        selection = self._restored.selection if self._restored else None
        if self._restored is None or selection is None:
            return True
        owner = selection.owners.get((artifact.kind, artifact.key))
        return owner is None or owner in self._restored.own or owner in selection.hits(self._hit_names())

    def _hit_names(self) -> set[Name]:
        """Returns the restored artifacts that were hit. Torch reports kind and key; our keys append what guards the artifact."""
        if self._restored is None or self._use is None:
            return set()
        hit = set(self._use.hit_keys)
        return {
            (artifact.kind, artifact.key)
            for artifact in self._restored.artifacts
            if (artifact.kind, artifact.key) in hit or (artifact.kind, artifact.key.partition("/")[0]) in hit
        }


def _identity(script: Mapping[str, Any]) -> str:
    """Returns what identifies a script and its arguments, because it may set what torch's own keys leave out."""
    text = Path(script["path"]).read_bytes()
    return hashlib.sha256(text + json.dumps(list(script["arguments"])).encode()).hexdigest()


def _within(limit_s: float, call: Callable[[], Result]) -> Result:
    """Returns the call's result if it ends within the limit."""
    if limit_s <= 0:
        raise TimeoutError("there is no time for it")
    outcome: list[Result] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="compile-cache", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"it took more than {limit_s:.0f} s")
    return outcome[0]


def _sentence(error: Exception) -> str:
    text = " ".join(redact_text(str(error)).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
