"""Settings that the advice on a trial names: a search tries them on the same setting, and keeps them if that helps."""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import NamedTuple

from compile_sweep.schema.causes.remedies import remedy_of
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.objectives import Record
from compile_sweep.schema.outcome import Label, Status
from compile_sweep.schema.part_settings import left_out_in
from compile_sweep.schema.settings import CompileSettings, Scope

_PROBE = "backend=aot_eager"
"""Runs what Dynamo and AOTAutograd make without Inductor: if its numbers are wrong, too, no option of Inductor mends them."""


class Retry(NamedTuple):
    """A setting that was tried, and the same with a remedy, or with a backend that tells whether remedies can help."""

    tried: CompileSettings
    amended: CompileSettings
    remedy: str
    label: str | None = None  # of the trial without it

    @property
    def reason(self) -> str:
        if self.remedy == _PROBE:
            return f"{_PROBE}, which tells whether Inductor's code is at fault"
        return f"{self.remedy}, which the advice on the same without it names"


class Remedies:
    """Settings to try again with what the advice on their trials names, each remedy once, and the remedies that helped.

    Before options of Inductor are tried for wrong numbers, one trial of `backend=aot_eager` in each scope tells whether they can
    help. Once a remedy has helped, all later settings of the same scope get it, because they would fail for the same reason.
    One that leaves a module eager is for all scopes.
    """

    def __init__(self, settings: Sequence[CompileSettings]) -> None:
        self._settings = settings  # that a search may propose
        self._due: list[Retry] = []
        self._retries: dict[str, Retry] = {}  # by the key of the amended setting
        self._tried: set[str] = set()
        self._waiting: dict[str, Retry] = {}  # by the key of the probe that each waits for
        self._inductor_is_wrong: dict[Scope, bool] = {}  # by the scopes that were probed
        self._kept: dict[str, CompileSettings] = {}  # by the key of a setting: the same with the remedy that helped

    @property
    def due(self) -> Retry | None:
        """The next retry; None if there is none."""
        return self._due[0] if self._due else None

    def begin(self, retry: Retry) -> None:
        """Takes note that a retry is under way, or was dropped."""
        self._due = [one for one in self._due if one.amended.key != retry.amended.key]

    def key_of_tried(self, key: str) -> str:
        """Returns the key of the setting that one with this key stands for: itself, unless a remedy was added."""
        return self._retries[key].tried.key if key in self._retries else key

    def is_probe(self, key: str) -> bool:
        """Tells whether the setting with this key only shows if Inductor is at fault."""
        return key in self._waiting

    def amended(self, setting: CompileSettings) -> CompileSettings:
        """Returns a setting with the remedy that helped others of its scope."""
        return self._kept.get(setting.key, setting)

    def tell(self, setting: CompileSettings, record: Record, *, is_usable: bool, helps: bool) -> None:
        """Learns from the record of a setting, of which a remedy is tried next if its advice names one that was not tried.

        Args:
            helps: Whether it is usable, and no slower than without its remedy if that was usable, too.
        """
        if (retry := self._retries.get(str(record["settings_key"]))) is not None:
            self.begin(retry)
            if (waiting := self._waiting.pop(retry.amended.key, None)) is not None:
                self._inductor_is_wrong[setting.scope] = is_wrong = record.get("label") != Label.DIVERGES
                self._due += [waiting] if is_wrong else []
                return
            fails_later = retry.label == record.get("label") == Label.COMPILE_ERROR and remedy_of(record) != retry.remedy
            is_only_slow = retry.label is not None and record.get("status") == Status.STOPPED
            if (helps or fails_later or is_only_slow) and self._kept.get(retry.tried.key) != retry.amended:
                self._keep(retry)
            if is_usable:
                return
        remedy = remedy_of(record, self._tried)
        if remedy is None or setting.scope is Scope.EAGER:
            return
        self._tried.add(remedy)
        both = remedy if retry is None else f"{retry.remedy},{remedy}"
        label = record.get("label")
        is_of_inductor = label == Label.DIVERGES and all(one.startswith("inductor.") for one in remedy.split(","))
        if is_of_inductor and self._inductor_is_wrong.get(setting.scope) is False:
            return
        if (due := self._retry(setting, both, label)) is None:
            return
        probes = is_of_inductor and setting.scope not in self._inductor_is_wrong
        self._due.append(self._probe(due) if probes else due)

    def _probe(self, waiting: Retry) -> Retry:
        """Returns the trial that tells whether a retry can help; the retry itself if its setting needs Inductor."""
        try:
            plain = replace(waiting.tried, backend="aot_eager", mode=None, cudagraphs=None, options=None)
        except SettingsError:
            return waiting
        probe = waiting._replace(amended=plain, remedy=_PROBE)
        self._waiting[plain.key], self._retries[plain.key] = waiting, probe
        return probe

    def _keep(self, helpful: Retry) -> None:
        """Gives all settings of a scope the remedy that helped one; a resumed search then knows their records, too."""
        self.give(helpful.remedy, {helpful.tried.scope} if left_out_in(helpful.remedy) is None else {*Scope} - {Scope.EAGER})

    def give(self, remedy: str, scopes: Container[Scope]) -> None:
        """Gives all settings of some scopes a remedy."""
        self._tried.add(remedy)
        of_scopes = (setting for setting in self._settings if setting.scope in scopes)
        retries = (self._retry(setting, remedy) for setting in of_scopes)
        self._kept |= {retry.tried.key: retry.amended for retry in retries if retry is not None}

    def _retry(self, setting: CompileSettings, remedy: str, label: str | None = None) -> Retry | None:
        """Returns a setting with a remedy; None if it has another value for one of the remedy's settings."""
        try:
            retry = Retry(setting, CompileSettings.parse(f"{setting.key},{remedy}"), remedy, label)
        except SettingsError:
            return None
        self._retries[retry.amended.key] = retry
        return retry
