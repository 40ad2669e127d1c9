"""Plans a sweep of a person's script: its command-line options, and how its plan differs from a workload's."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from compile_sweep import command_line
from compile_sweep.contract.workload_facts import SCRIPT_FACTS, WorkloadFacts
from compile_sweep.schema.choices import MemoryFormat
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.redact import REDACTED
from compile_sweep.schema.settings import CompileSettings, Scope
from compile_sweep.script.job import ScriptJob
from orchestrator.config import SweepCommand
from orchestrator.plan.library_arguments import equivalents
from orchestrator.plan.recipes import ARGUMENTS_FOLLOW, AS_WRITTEN
from orchestrator.plan.script_code import read_code
from orchestrator.plan.space import Choice

Options = TypeVar("Options")

BATCH_ARGUMENT = "--batch-arg"


def split_arguments(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Splits the command's own words from a script's arguments, which follow `--`; None for the latter without `--`."""
    own = list(words)
    at = own.index("--") if "--" in own else len(own)
    before, after = own[:at], own[at + 1 :] if "--" in own else None
    if BATCH_ARGUMENT in before[:-1]:  # the next word looks like an option of ours, but is the script's
        at = before.index(BATCH_ARGUMENT)
        before[at : at + 2] = [f"{BATCH_ARGUMENT}={before[at + 1]}"]
    return before, after


def parse_own(
    options: type[Options], prog: str, words: Sequence[str], arguments: Sequence[str] | None, *, default: Options | None = None
) -> Options:
    """Parses the command's own words. If one is unknown and may be the script's, the error says where those go."""
    try:
        return command_line.parse(options, prog, words, default=default)
    except command_line.UsageError as error:
        unknown = re.match(r"no option or argument '(.+?)'; (did you mean .+\? )?", f"{error} ")
        if unknown is None:
            raise
        word, hint = unknown[1], (unknown[2] or "").strip()
        of_script = any(own.partition("=")[0] == "--script" for own in words)
        flag = word.partition("=")[0].replace("_", "-")
        name = flag.removeprefix("--").replace("-", "_")
        if flag in command_line.flags(SweepCommand).values():
            hint = "it is an option of compile-sweep sweep."
        elif "settings" in command_line.flags(options) and name in (_SETTINGS if of_script else {*_SETTINGS, "batch_size"}):
            hint = f"{name} is a setting: write --settings {name}=VALUE, or --vary {name}=VALUES to try several."
        elif arguments is not None or not of_script:
            raise
        if arguments is None and of_script:
            follow = ARGUMENTS_FOLLOW.format(word=word)
            hint = f"{hint} A{follow[1:]}" if hint else follow
        raise command_line.UsageError(f"no option or argument '{word}'; {hint.removesuffix('.')}") from None


_SETTINGS = {declared.name for declared in fields(CompileSettings) if declared.metadata} | {"scope", "optimizer"}


def job_of(
    script: str | None,
    arguments: Sequence[str] | None,
    *,
    in_place: bool = False,
    compile_loss: bool = False,
    batch_argument: str | None = None,
    seed: int = 0,
    stored: Mapping[str, Any] | None = None,
    not_for_scripts: Mapping[str, object] | None = None,
) -> ScriptJob | None:
    """Returns what trials run instead of a workload; None for a sweep of a workload.

    Args:
        stored: Job of the sweep that is resumed, if any.
        not_for_scripts: Values of options that do not apply to scripts, by option.

    Raises:
        ConfigError: An option does not go with a script, or needs one.
        ScriptError: There is no such file.
    """
    if script is None and stored is not None:
        before = ScriptJob.from_dict(stored)
        own = before.arguments if arguments is None else arguments
        if any(REDACTED in word for word in own):
            raise ConfigError("the script's arguments held a secret, which was not written down; give all of them again after --")
        return ScriptJob.of(
            before.given,
            own,
            folder=before.folder,
            in_place=before.in_place,
            seed=before.seed,
            batch_argument=batch_argument or before.batch_argument,
        )
    if script is None:
        for is_given, word in (
            (arguments is not None, "what follows after --"),
            (in_place, "--in-place"),
            (compile_loss, "--compile-loss"),
            (batch_argument is not None, BATCH_ARGUMENT),
        ):
            if is_given:
                raise ConfigError(f"{word} is for a script; name one with --script FILE")
        return None
    for word, said in (not_for_scripts or {}).items():
        if said:
            raise ConfigError(f"{word} is for workloads, and --script takes the place of one; leave it out")
    return ScriptJob.of(script, arguments or (), in_place=in_place, seed=seed, batch_argument=batch_argument)


_REGIONAL_SHARE_OF_CONVOLUTIONS = 1.5
"""`regional_share` of a script's model with convolutions: that of a ResNet-50, whose stages all differ."""


_RECOMPUTES = r"(gradient|activation)[_-]checkpointing|utils\.checkpoint|checkpoint_sequential|grad_checkpoint|use_reentrant"
"""Pattern of the ways to ask for activations that are recomputed, in lower case."""


_EXPERTS = r"moe|mixtral|expert|gptoss|gpt_oss|deepseek|dbrx|jamba"
"""Pattern of the mixtures of experts among the models of transformers, in lower case."""


_OF_BLOCKS = ("modulelist", "sequential", "transformer", "timm", "torchvision.models")
"""What models with repeated blocks are written with, in lower case."""


_WITHOUT_MODELS = frozenset(
    {
        *sys.stdlib_module_names,
        *("accelerate", "click", "compile_sweep", "datasets", "einops", "gym", "gymnasium", "h5py", "hydra", "lightning"),
        *("matplotlib", "numpy", "omegaconf", "pandas", "PIL", "psutil", "pytorch_lightning", "rich", "scipy", "sklearn"),
        *("tensorboard", "tensorboardX", "torch", "torchmetrics", "torchvision", "tqdm", "typer", "wandb", "yaml"),
    }
)
"""Packages that make no model by themselves; torchvision's are `torchvision.models`."""


def script_facts(job: ScriptJob) -> WorkloadFacts:
    """Returns what a plan can tell about a script before it runs, from the text of the script and of its own modules.

    The facts only decide which levers are tried first; a lever that does not fit the script costs a trial.
    """
    text, packages = read_code(job)

    def mentions(*words: str) -> bool:
        return any(word in text for word in words)

    is_3d = mentions("conv3d", "spatial_dims=3", "unet3d", "torchvision.models.video") and not mentions("conv2d")
    is_convolutional = is_3d or mentions("conv2d", "resnet", "convnext", "torchvision.models", "timm", "unet")
    layout = MemoryFormat.CHANNELS_LAST_3D if is_3d else MemoryFormat.CHANNELS_LAST
    return replace(
        SCRIPT_FACTS,
        options={} if job.batch_argument is None else {"batch_size": int},
        memory_format=layout if is_convolutional or mentions("image", "pixel", "vision") else None,
        regional_share=_REGIONAL_SHARE_OF_CONVOLUTIONS if is_convolutional else None,
        has_attention=mentions("attention", "transformer"),
        has_blocks=None if mentions(*_OF_BLOCKS) or packages - _WITHOUT_MODELS else False,
        recomputes=any(re.search(_RECOMPUTES, one) for one in (text, *job.arguments)) or None,
        can_pad=None if mentions("transformers", "attention_mask") else False,
        makes_cache=None if mentions("transformers", "use_cache") else False,
        float32_experts=None if mentions("transformers") and re.search(_EXPERTS, text) else False,
    )


def findings_lines(findings: Mapping[str, Sequence[str]]) -> list[str]:
    """Formats each trial's findings as lines; what trials found with other numbers is given as the unchanged script has it."""
    unchanged = findings.get(CompileSettings.from_dict(AS_WRITTEN).key, ())
    found: dict[str, str] = {}
    for line in (*unchanged, *(line for lines in findings.values() for line in lines)):
        kind = line.partition(":")[0] if line.startswith("module ") else re.split(r"[\d,]", line)[0]
        found.setdefault(kind, line)
    return [f"found: {line}" for line in sorted(found.values(), key=lambda line: not line.startswith("a step waits for"))]


def library_equivalents(job: ScriptJob, settings_key: str) -> dict[str, str]:
    """Returns arguments that apply a setting in the script's own libraries, by description."""
    same = equivalents(CompileSettings.parse(settings_key), read_code(job).text)
    return {f"the same in {place}(...)": text for place, text in same}


def with_baseline(chosen: Choice, *, compile_loss: bool = False) -> Choice:
    """Returns the choice with the unchanged script in first place."""
    baseline = CompileSettings.from_dict(AS_WRITTEN)
    others = (setting for setting in chosen.settings if setting != baseline)
    if compile_loss:
        others = (replace(setting, compile_loss=True) if setting.scope is Scope.FULL else setting for setting in others)
    return replace(chosen, settings=(baseline, *dict.fromkeys(others)))
