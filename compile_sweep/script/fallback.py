"""What a script's run does when something runs eagerly that its settings compile."""

import re
from collections.abc import Sequence
from itertools import chain

from torch import nn

from compile_sweep.harness.diagnostics.capture import Diagnostics
from compile_sweep.harness.protocol import Protocol
from compile_sweep.schema.causes.remedies import OF_THE_LOSS, remedy_of
from compile_sweep.schema.outcome import Label, reason_of_fallback
from compile_sweep.schema.part_settings import left_out
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.discover import Discovery


class FallbackWatch:
    """Decides when a run ends because of a fallback: its settings cannot be used whatever their speed.

    The rest may take minutes: a T5-base compiled for 190 s more. If a setting is known that may mend the fallback, a run with it
    is worth more than the rest of this one.
    """

    def __init__(self, settings: CompileSettings, found: Discovery, protocol: Protocol) -> None:
        self._settings, self._found, self._protocol = settings, found, protocol
        self._seen = (0, 0)
        self._reason = ""
        self._remedy: str | None = None

    def why_to_end(self, found: Diagnostics, elapsed_s: float) -> str | None:
        """Returns why a run ends now, `elapsed_s` seconds after its beginning; None if it goes on."""
        seen = (len(found.fallbacks), len(found.graph_break_reasons))
        if seen != self._seen:  # this is asked at each of torch's messages
            self._seen = seen
            further = leaving_out(self._found, self._settings, found.fallbacks)
            self._reason = "; ".join([reason_of_fallback(found.fallbacks, found.graph_break_reasons), *further])
            record = {
                "label": Label.SILENT_FALLBACK,
                "reason": self._reason,
                "fallbacks": found.fallbacks,
                "graph_break_reasons": found.graph_break_reasons,
            }
            self._remedy = remedy_of(record, tried=self._settings.key.split(","))
        may_be_mended = self._remedy or OF_THE_LOSS in self._reason
        patience_s = self._protocol.remedy_patience_s if may_be_mended else self._protocol.fallback_patience_s
        if elapsed_s < patience_s:
            return None
        ended = f"the trial ended after {elapsed_s:.1f} s of compiling and warming up"
        because = f", because {self._remedy} may mend it" if self._remedy else ""
        return f"{self._reason}; {ended}{because}"


def leaving_out(found: Discovery, settings: CompileSettings, fallbacks: Sequence[str]) -> list[str]:
    """Returns a sentence with the settings that leave out what fallbacks belong to; none unless something else is compiled.

    Args:
        found: What was discovered in the script.
        settings: The settings that compile it.
        fallbacks: A record's `fallbacks`, which name the class whose forward runs eagerly.
    """
    compiled = found.all_compiled
    classes = [(target, _classes(target.module)) for target in compiled]
    of_losses = {name for loss in found.loss_modules for name in _classes(loss)} if settings.compile_loss else set()
    theirs, are_of_losses = [], []
    for text in fallbacks:
        named = {*chain(*re.findall(r" of (?:class )?([\w.<>]+)|([\w.<>]+)\.forward ", text))}
        owners = [target for target, names in classes if names & named]
        theirs.append(owners[0] if len(owners) == 1 else None)
        are_of_losses.append(not owners and bool(of_losses & named))
    if are_of_losses and all(are_of_losses):
        return [OF_THE_LOSS]
    left = {target.name: left_out(target.name) for target in compiled if target in theirs}
    if None in theirs or None in left.values() or not 0 < len(left) < len(compiled):
        return []
    return [f"what runs eagerly is in {' and '.join(left)}: try {','.join(map(str, left.values()))} to compile the others alone"]


def _classes(module: nn.Module) -> set[str]:
    return {type(part).__qualname__ for part in module.modules()}
