"""`python -m orchestrator.cache`: lists, verifies, exports and cleans up a store of compile caches. See docs/caches.md."""

if __name__ == "__main__":  # before imports that fail without the extra `run`
    from orchestrator.cli import exit_without_extra

    exit_without_extra("cache")

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import tyro

from compile_sweep import command_line
from compile_sweep.command_line import Flag
from compile_sweep.schema.errors import CacheError, SettingsError
from compile_sweep.schema.journal import read_regular, written_whole
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.visible_text import counted, for_terminal
from orchestrator.artifacts import ArtifactStore, Manifest, SigningKey, environment_facts, open_store, trial_facts
from orchestrator.artifacts.explain import Side, explain, nearest, sentences
from orchestrator.artifacts.object_store import normalized
from orchestrator.artifacts.shelf import Use
from orchestrator.environment import fingerprint

PROG = "python -m orchestrator.cache"
DEFAULT = "results/cache"  # where sweeps store artifacts by default
HERE = "here"  # name of this environment for `explain`

SHOWN_DIGITS = 8
_MOST_IMPORTED_BYTES = 1 << 33
_NO_ARTIFACTS = "holds no artifacts that torch.compiler.save_cache_artifacts or `export` wrote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What every command takes."""

    cache: Annotated[str, tyro.conf.arg(name="cache-store", aliases=("--cache",))] = DEFAULT
    """The store: a folder, s3://bucket/prefix, gs://…, another URI of pyarrow, or fsspec+ and one of fsspec."""
    key_file: Path | None = None
    """The file with the signing key; by default COMPILE_SWEEP_CACHE_KEY, or else ~/.config/compile-sweep/cache.key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions(Place):
    """List what each trial published, how large it is, and how often it was hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions(Place):
    """Show one trial's artifacts by kind, and the environment they were made in."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """A trial's id, or the first digits of a manifest's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions(Place):
    """Read every artifact, check signatures and contents, and remove damaged contents, which can be published again."""

    remove: Flag = False
    """Also remove manifests that are refused, including those signed with other people's keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOptions(Place):
    """Remove artifacts that have not been used for long, or that exceed a size limit."""

    max_age_days: float | None = None
    """Remove manifests that were neither made nor hit in this many days."""
    max_gb: float | None = None
    """Remove the least recently used until the rest fits into this many GB (10⁹ bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(Place):
    """Write one trial's artifacts as a file that a production job restores with torch alone."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """A trial's id, or the first digits of a manifest's id."""
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The file to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions(Place):
    """Sign and publish a file of `export` or torch.compiler.save_cache_artifacts. It holds code: import only trusted files."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The file to import; it must have been made in an environment like this one."""
    workload: str = "captioning"
    """The workload that was compiled."""
    size: str | None = None
    """One of the workload's sizes; by default the first one with a GPU and the last one without."""
    settings: str = "scope=full"
    """The compile settings it was compiled with, like scope=regional,dynamic=auto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions(Place):
    """Explain why the artifacts of one trial or environment cannot serve another."""

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """A trial's id, the first digits of a manifest's id, `here`, or a JSON file of components and values."""
    b: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="B")] = None
    """What to compare A with, in the same form; by default the trial in the store that differs least from A."""


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Runs the command; returns its exit code."""
    return command_line.run(lambda: _dispatch(prog, command_line.words_of(arguments)))


def _dispatch(prog: str, words: Sequence[str]) -> int:
    if (chosen := command_line.chosen(COMMANDS, prog, words)) is None:
        return 0
    options, run = chosen
    return run(options)


def _list(options: ListOptions) -> int:
    store = _open(options)
    listing, uses = store.manifests(), store.uses()
    contents = {entry.digest: entry.size_bytes for manifest in listing.manifests for entry in manifest.entries}
    for line in _listed(listing.manifests, uses):
        print(for_terminal(line, sys.stdout))
    apart = sum(manifest.size_bytes for manifest in listing.manifests)
    held = sum(contents.values())
    number = counted(len(listing.manifests), "manifest")
    print(f"{store.location}: {number}; {held / 1e6:.1f} MB, {apart / 1e6:.1f} MB if each kept its own")
    return _tell(listing.refused)


def _listed(manifests: Sequence[Manifest], uses: Mapping[str, Use]) -> Iterator[str]:
    """Yields the headings, and two lines for each manifest, which fit a terminal: its figures, and below them what it is of."""
    rows = [["id", "made by", "made at", "entries", "MB", "hits"]]
    for manifest in manifests:
        made_at = datetime.fromisoformat(manifest.created_at).astimezone()
        figures = len(manifest.entries), f"{manifest.size_bytes / 1e6:.1f}", uses.get(manifest.id, Use()).hits
        rows.append([manifest.id[:SHOWN_DIGITS], manifest.maker, f"{made_at:%Y-%m-%d %H:%M}", *map(str, figures)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join((str.ljust if at < 3 else str.rjust)(row[at], widths[at]) for at in range(len(widths))) for row in rows]
    yield from lines[: 1 if manifests else 0]
    for line, manifest in zip(lines[1:], manifests, strict=True):
        yield line
        environment = manifest.environment[:SHOWN_DIGITS]
        yield f"  {manifest.workload} {manifest.size}: {_label(manifest.settings_key)}; environment {environment}"


def _show(options: ShowOptions) -> int:
    store = _open(options)
    manifest = _find(store.manifests().manifests, options.name, store)
    print(f"manifest     {manifest.id}\nmade by      {manifest.maker}, {manifest.created_at}")
    print(f"for          {manifest.workload} {manifest.size}, {manifest.settings_key}")
    print(f"hits         {store.uses().get(manifest.id, Use()).hits}")
    print(f"environment  {manifest.environment}")
    for name, value in sorted(manifest.facts.items()):
        print(f"  {name}: {value}")
    print(f"entries      {len(manifest.entries)}, {manifest.size_bytes / 1e6:.1f} MB")
    for kind, count in Counter(entry.kind for entry in manifest.entries).most_common():
        entries = [entry for entry in manifest.entries if entry.kind == kind]
        size, cost_s = sum(entry.size_bytes for entry in entries), sum(entry.cost_s for entry in entries)
        print(f"  {kind}: {count}, {size / 1e6:.2f} MB" + (f", {cost_s:.1f} s to compile" if cost_s else ""))
    return 0


def _verify(options: VerifyOptions) -> int:
    store = _open(options)
    listing = store.manifests()
    refused = list(listing.refused)
    good: set[str] = set()
    for manifest in listing.manifests:
        fetched = store.fetch([entry for entry in manifest.entries if entry.digest not in good], manifest.environment)
        good |= {artifact.digest for artifact in fetched.artifacts}
        refused += [f"{manifest.id[:SHOWN_DIGITS]} {sentence}" for sentence in fetched.refused]
    number = counted(len(listing.manifests), "manifest")
    print(f"{store.location}: {number} and {len(good)} contents are as they were published")
    if options.remove:
        removed = store.remove_refused()
        print(f"removed {counted(removed, 'manifest')}")
    return _tell(refused)


def _gc(options: GcOptions) -> int:
    for name, bound in (("--max-age-days", options.max_age_days), ("--max-gb", options.max_gb)):
        if bound is not None and not 0 <= bound < float("inf"):
            raise command_line.UsageError(f"{name} {bound} is not a bound; use 0 or more")
    store = _open(options)
    collected = store.collect(
        max_age=None if options.max_age_days is None else timedelta(days=min(options.max_age_days, 1e6)),
        max_bytes=None if options.max_gb is None else int(min(options.max_gb, 1e12) * 1e9),
    )
    print(
        f"{store.location}: removed {counted(collected.manifests, 'manifest')} and {collected.blobs} contents, "
        f"{collected.freed_bytes / 1e6:.1f} MB; {collected.kept_bytes / 1e6:.1f} MB are left"
        + (
            f"; contents stay while {counted(collected.unread, 'manifest')} cannot be read, see `verify --remove`"
            if collected.unread
            else ""
        )
    )
    return 0


def _export(options: ExportOptions) -> int:
    store = _open(options)
    manifest = _find(store.manifests().manifests, options.name, store)
    fetched = store.fetch(manifest.entries, manifest.environment)
    if not fetched.artifacts:
        raise CacheError(f"nothing of {options.name} can be read from {store.location}, the first because {fetched.refused[0]}"
                         if fetched.refused else f"{options.name} has no artifacts")  # fmt: skip
    from compile_sweep.harness.compile_cache.transfer import make_bundle  # loads torch

    content = make_bundle(fetched.artifacts)
    try:
        with written_whole(options.file) as unfinished:
            unfinished.write_bytes(content)
    except OSError as error:
        raise CacheError(f"{options.file} cannot be written ({error.strerror})") from None
    print(f"# {len(fetched.artifacts)} artifacts, {len(content) / 1e6:.1f} MB, SHA-256 {hashlib.sha256(content).hexdigest()}")
    restored = f"artifacts = pathlib.Path({str(options.file)!r}).read_bytes()"  # by a job, before it compiles anything
    print("import pathlib, torch", restored, "torch.compiler.load_cache_artifacts(artifacts)", sep="\n")
    return _tell(fetched.refused)


def _import(options: ImportOptions) -> int:
    try:
        settings = CompileSettings.parse(options.settings)
        content = read_regular(options.file, max_bytes=_MOST_IMPORTED_BYTES)
    except SettingsError as error:
        raise CacheError(f"--settings {options.settings}: {error}") from None
    except OSError as error:
        raise CacheError(f"{options.file} cannot be read ({error.strerror})") from None
    store = _open(options, may_be_new=True)
    from compile_sweep.contract.base import load_workload  # loads torch, like the imports below
    from compile_sweep.harness.compile_cache.bundles import split_bundle
    from compile_sweep.harness.compile_cache.transfer import torch_configuration

    try:
        artifacts = split_bundle(content)
    except Exception as error:  # torch's reader has no errors of its own
        raise CacheError(f"{options.file} {_NO_ARTIFACTS}: {ascii(str(error))[1:-1][:200]}") from None
    if not artifacts:
        raise CacheError(f"{options.file} {_NO_ARTIFACTS}")
    kind, use_gpu = load_workload(options.workload), bool(fingerprint().gpu)
    workload = kind(options.size or kind.sizes[0 if use_gpu else -1], 0)
    with workload.process_settings():
        facts = trial_facts(torch_configuration(), settings, use_gpu=use_gpu)
    published = store.publish(
        Manifest(
            facts=facts,
            workload=options.workload,
            size=workload.size,
            settings_key=settings.key,
            maker=f"import of {options.file.name}",
        ),
        artifacts,
    )
    print(f"{store.location}: {published.new_entries} of {len(published.manifest.entries)} entries are new")
    return 0


def _explain(options: ExplainOptions) -> int:
    manifests: tuple[Manifest, ...] = ()
    store = _open(options)
    if any(name != HERE and not _is_file(name) for name in (options.a, options.b)):
        manifests = store.manifests().manifests
    if options.b is None and (options.a == HERE or _is_file(options.a)):
        raise command_line.UsageError(f"{options.a} is not a trial; name what to compare it with")
    a, b = (None if name in (HERE, None) else _side(name, manifests, store) for name in (options.a, options.b))
    if options.b is None:
        closest = nearest(_find(manifests, options.a, store), manifests)
        if closest is None:
            raise CacheError(f"{store.location} holds nothing else to compare {options.a} with")
        b = Side.of(closest, closest.maker)
    a, b = a or _here(b), b or _here(a)
    for sentence in sentences(a, b, explain(a, b)):
        print(sentence)
    return 0


def _here(other: Side | None) -> Side:
    """Returns this environment as the trial's process on the other side has it, without importing a user's workload."""
    from compile_sweep.contract.base import load_workload  # loads torch, like the import below
    from compile_sweep.contract.workload_names import BUILT_IN
    from compile_sweep.harness.compile_cache.transfer import torch_configuration

    with ExitStack() as settled:
        if other is not None and other.manifest is not None and other.manifest.workload in BUILT_IN:
            kind = load_workload(other.manifest.workload)
            settled.enter_context(kind(kind.sizes[0], 0).process_settings())
        return Side(name=HERE, facts=environment_facts(torch_configuration()))


def _side(name: str, manifests: Sequence[Manifest], store: ArtifactStore) -> Side:
    if not _is_file(name):
        return Side.of(_find(manifests, name, store), name)
    try:
        values = json.loads(read_regular(Path(name)))
        facts = {str(component): str(value) for component, value in values.items()}
        "".join((*facts, *facts.values())).encode()  # raises an error if it cannot be printed
    except (OSError, ValueError, AttributeError, RecursionError):
        raise CacheError(f"{name} is not a JSON object of components and values, as {PROG} explain compares") from None
    return Side(name=name, facts=facts)


def _is_file(name: str | None) -> bool:
    return name is not None and name.endswith(".json")


def _find(manifests: Sequence[Manifest], name: str, store: ArtifactStore) -> Manifest:
    """Returns the newest manifest of a trial, or the one whose ID begins with `name`."""
    by_maker = [manifest for manifest in manifests if manifest.maker == name]
    by_id = [manifest for manifest in manifests if name and manifest.id.startswith(name)]
    if not by_maker and not by_id:
        raise CacheError(f"{store.location} holds nothing of {name!r} that the key here has signed; `list` shows what it holds")
    if not by_maker and len(by_id) > 1:
        raise CacheError(f"{name} begins the ids of {len(by_id)} manifests; give more of it")
    return (by_maker or by_id)[-1]


def _open(options: Place, *, may_be_new: bool = False) -> ArtifactStore:
    if options.cache.startswith(("redis://", "rediss://")):
        raise CacheError("what Inductor keeps on Redis is Inductor's; this command is for folders and object stores")
    if "://" not in options.cache and not may_be_new and not os.path.isdir(normalized(options.cache)):
        raise CacheError(f"there is no folder {options.cache!r}; name one with --cache-store, or a URI")
    environ = {} if options.key_file else os.environ  # an explicit file takes precedence over the variable
    return open_store(options.cache, key=SigningKey.load(options.key_file, environ))


def _label(settings_key: str) -> str:
    try:
        return CompileSettings.parse(settings_key).label
    except SettingsError:  # written by another version of this project
        return settings_key


def _tell(refused: Sequence[str]) -> int:
    """Prints what was refused; returns exit code 1 if anything was, so that scripts notice."""
    for sentence in refused:
        print(f"refused: {sentence}", file=sys.stderr)
    return 1 if refused else 0


COMMANDS: dict[str, tuple[type[Any], Callable[[Any], int]]] = {
    "list": (ListOptions, _list),
    "show": (ShowOptions, _show),
    "verify": (VerifyOptions, _verify),
    "gc": (GcOptions, _gc),
    "export": (ExportOptions, _export),
    "import": (ImportOptions, _import),
    "explain": (ExplainOptions, _explain),
}

if __name__ == "__main__":
    sys.exit(main())
