"""Pads the texts of a script's batches to multiples of a length, in the calls of its modules, and cuts their outputs back.

Background: texts come padded to the longest of their batch, so hardly two batches have the same shape. Each shape costs memory
that is allocated anew, attention kernels that are planned anew, or a CUDA graph. With multiples of 64 a few shapes remain.

Arguments are recognized by the names that models of transformers give them. Padding changes nothing that training computes: the
attention mask leaves it out, and labels of -100 do not count (`ignore_index` of torch's losses).
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compile_sweep.script.discover import Target
from compile_sweep.script.gradients import tensors_of

Call = Callable[..., Any]

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"
_DECODER = "decoder_"
_TEXT = (IDS, MASK, "token_type_ids", "position_ids", "global_attention_mask")
"""Arguments of one row for each text and one column for each token; a decoder's begin with `decoder_`."""
_IGNORED = -100
_OF_HEADS = ("attentions", "past_key_values")  # outputs whose second dimension is one of heads
_POSITIONS = ("max_position_embeddings", "max_target_positions")  # of configurations: how long a text may be
_ANSWERS = ("start_positions", "end_positions")
"""Arguments with which models of transformers look for an answer among all tokens, padding too, so that it changes the loss."""
_OF_TOKENS = ("start_logits", "end_logits")  # outputs of one number for each token, unlike those of one row for each text

MOST_CHANGE, ROUNDINGS = 1e-2, 50.0
"""Largest change of outputs by padding that may be rounding, and the same as a multiple of the rounding of a step's precision:
10% in bfloat16. An average over all tokens changes by more if half of them are padding.
"""


def why_not_padded(target: Target) -> str | None:
    """Returns why the calls of a module that the discovery saw cannot be padded; None if they can, and their lengths change."""
    changing = target.changing()
    texts = [name for name, dims in changing.items() if _last(name) == IDS and 1 in dims]
    written = [name for name, dims in changing.items() if _last(name) == LABELS and 1 in dims]
    if not texts and not (written and _has_decoder(target.module)):
        return f"pad_to_multiple_of pads {IDS} that change in length, and {target.name} is not called with any; leave it out"
    first = target.shapes[0]
    if any(len(first[name]) != 2 or first.get(f"{name.removesuffix(IDS)}{MASK}") != first[name] for name in texts):
        return f"pad_to_multiple_of needs an {MASK} of the shape of {IDS}, and {target.name} is called without one; leave it out"
    if any(_last(name) in _ANSWERS for name in first):
        return f"pad_to_multiple_of would change the loss of {target.name}, which looks for answers in padding too; leave it out"
    known = {*_TEXT, LABELS, *(_DECODER + name for name in _TEXT)}
    for name, dims in changing.items():
        if (set(dims) - {0} and _last(name) not in known) or not {*dims} <= {0, 1}:
            return f"pad_to_multiple_of cannot pad {name} of {target.name}, which changes in shape too; leave it out"
    return None


def _has_decoder(module: nn.Module) -> bool:
    """Tells whether a module is a model of transformers whose decoder writes what the labels say."""
    return getattr(next(_configs(module), None), "is_encoder_decoder", False) is True


def _configs(module: nn.Module) -> Iterator[Any]:
    return (config for part in module.modules() if (config := getattr(part, "config", None)) is not None)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def change_of_outputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Returns how far a module's outputs move if padding makes its texts twice as long, relative to their norms; the largest.

    A module that leaves padding out moves by rounding alone; one that averages over all tokens, say, by much more. It is called
    twice, in evaluation mode and without gradients. Returns 0 if there is no memory for that, or no text.
    """
    found: list[_Padding] = []
    Padder(module, 1)._replaced(args, kwargs, _Replacing(lambda _, tensor, columns: tensor, found))
    if not found:
        return 0.0
    pads = Padder(module, 2 * max(one.length for one in found))
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            plain = list(tensors_of(module(*args, **kwargs)))
            padded = list(tensors_of(pads.around(module, applies=lambda: True)(*args, **kwargs)))
    except torch.OutOfMemoryError:
        return 0.0
    finally:
        for part, was_training in training.items():
            part.training = was_training
    masks = [one.mask for one in found if one.mask is not None]
    return max((_change(*pair, masks) for pair in zip(plain, padded, strict=False)), default=0.0)


def _change(before: Tensor, after: Tensor, masks: Iterable[Tensor]) -> float:
    if before.shape != after.shape or not before.is_floating_point():
        return 0.0
    for mask in masks:
        if before.shape[:2] == mask.shape:  # what was padding before may be anything
            before, after = before[mask.bool()], after[mask.bool()]
    norm = float(before.float().norm())
    return float((after.float() - before.float()).norm()) / norm if norm else 0.0


class _Padding(NamedTuple):
    """What is padded of a text."""

    arguments: tuple[str, ...]
    length: int
    padded: int
    is_written: bool  # by a decoder
    mask: Tensor | None


class Padder:
    """Pads a module's calls, also texts in mappings and lists that it is called with.

    Args:
        multiple: Lengths become multiples of this, in tokens, as far as the model has positions. How many those are, and the
            token that pads, is read from configurations of transformers.
    """

    def __init__(self, module: nn.Module, multiple: int) -> None:
        self._multiple = multiple
        configs = list(_configs(module))
        self._has_decoder = _has_decoder(module)
        self._token = next(_numbers(configs, "pad_token_id"), 0)
        self._most = min(chain(*(_numbers(configs, name) for name in _POSITIONS)), default=None)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names: list[str] = []
        with suppress(TypeError, ValueError):  # a forward in native code
            parameters = inspect.signature(module.forward).parameters.values()
            self._names = [parameter.name for parameter in parameters if parameter.kind in positional]

    def around(self, call: Call, applies: Callable[[], bool]) -> Call:
        """Returns a replacement for the module's call, which pads where it applies."""

        def padded_call(*args: Any, **kwargs: Any) -> Any:
            found: list[_Padding] = []
            if applies():
                args, kwargs = self._replaced(args, kwargs, _Replacing(self._padded, found))
            outputs = call(*args, **kwargs)
            return _cut(outputs, found) if found else outputs

        return padded_call

    def without_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call as they are padded, tensors that are padded without their values."""

        def emptied(_: str, tensor: Tensor, columns: int) -> Tensor:
            return tensor.new_empty((len(tensor), tensor.size(1) + columns), device="meta")

        return self._replaced(args, kwargs, _Replacing(emptied, []))

    def _replaced(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], replacing: "_Replacing"
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = [*self._names[: len(args)], *map(str, range(len(self._names), len(args)))]
        changed = self._changed(dict(zip(names, args, strict=True)) | dict(kwargs), replacing)
        return tuple(changed.get(name, value) for name, value in zip(names, args, strict=True)), {
            name: changed.get(name, value) for name, value in kwargs.items()
        }

    def _changed(self, given: Mapping[Any, Any], replacing: "_Replacing") -> dict[Any, Any]:
        """Returns what takes the place of values of a mapping."""
        found = self._paddings(given)
        replacing.found.extend(found)
        columns = {name: one.padded - one.length for one in found for name in one.arguments if one.padded > one.length}
        new = {
            name: replacing.replace(name, value, columns[name]) if name in columns else self._inside(value, replacing)
            for name, value in given.items()
        }
        return {name: value for name, value in new.items() if value is not given[name]}

    def _inside(self, value: Any, replacing: "_Replacing") -> Any:
        """Returns a mapping or list with padded texts in it, and the value itself if there are none."""
        if isinstance(value, MutableMapping):
            if changed := self._changed(value, replacing):
                value = copy.copy(value)
                for name, one in changed.items():
                    value[name] = one
        elif type(value) in (list, tuple):
            new = [self._inside(one, replacing) for one in value]
            if any(one is not other for one, other in zip(new, value, strict=True)):
                value = type(value)(new)
        return value

    def _paddings(self, given: Mapping[Any, Any]) -> list[_Padding]:
        """Returns what to pad: a text and, of a model with a decoder, the text that it learns to write, perhaps alone."""
        ids, mask = given.get(IDS), given.get(MASK)
        if any(given.get(name) is not None for name in _ANSWERS):
            return []
        found: list[_Padding] = []
        if isinstance(ids, Tensor) and ids.dim() == 2 and isinstance(mask, Tensor) and mask.shape == ids.shape:
            found.append(self._padding(given, IDS, (*_TEXT, *(() if self._has_decoder else (LABELS,))), is_written=False))
        elif ids is not None:
            return []
        names = (LABELS, *(_DECODER + one for one in _TEXT))
        leader = next((name for name in names[:2] if _columns(name, given.get(name)) is not None), None)
        if self._has_decoder and leader is not None:
            found.append(self._padding(given, leader, names, is_written=True))
        return found

    def _padding(self, given: Mapping[Any, Any], leader: str, names: Sequence[str], *, is_written: bool) -> _Padding:
        length = given[leader].size(1)
        padded = -(-length // self._multiple) * self._multiple
        padded = padded if self._most is None else max(length, min(padded, self._most))
        arguments = tuple(name for name in names if _columns(name, given.get(name)) == length)
        return _Padding(arguments, length, padded, is_written, given.get(f"{_DECODER if is_written else ''}{MASK}"))

    def _padded(self, name: str, tensor: Tensor, columns: int) -> Tensor:
        value = _IGNORED if name == LABELS else self._token if name.endswith(IDS) else 0
        return nn.functional.pad(tensor, (0, columns), value=value)


class _Replacing(NamedTuple):
    """How tensors are replaced, given a name, the tensor and a number of columns; and what was found on the way."""

    replace: Callable[[str, Tensor, int], Tensor]
    found: list[_Padding]


def _numbers(configs: Iterable[Any], name: str) -> Iterator[int]:
    for config in configs:
        if type(number := getattr(config, name, None)) is int and number >= 0:
            yield number


def _columns(name: str, value: Any) -> int | None:
    """Returns the columns of an argument that may have one for each token, unlike labels that are shares of classes."""
    is_able = isinstance(value, Tensor) and value.dim() == 2 and not (name == LABELS and value.is_floating_point())
    return value.size(1) if is_able else None


def _cut(outputs: Any, found: Sequence[_Padding], name: str = "") -> Any:
    """Returns a module's outputs without what the padding added; of a model with a decoder, most are the decoder's."""
    if isinstance(outputs, Tensor):
        of_tokens = (*_OF_TOKENS, "logits") if any(LABELS in one.arguments for one in found) else _OF_TOKENS
        if not ((outputs.dim() > 2 and not name.endswith(_OF_HEADS)) or (outputs.dim() == 2 and name in of_tokens)):
            return outputs
        texts = [one for one in found if one.padded == outputs.size(1)]
        likely = [one for one in texts if one.is_written is not name.startswith("encoder_")]
        lengths = {one.length for one in likely or texts}
        return outputs.narrow(1, 0, lengths.pop()) if len(lengths) == 1 else outputs
    if isinstance(outputs, MutableMapping):  # such as ModelOutput of transformers
        for key, value in list(outputs.items()):
            if (cut := _cut(value, found, str(key))) is not value:
                outputs[key] = cut
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        for one in fields(outputs):
            if (cut := _cut(value := getattr(outputs, one.name), found, one.name)) is not value:
                setattr(outputs, one.name, cut)
    elif isinstance(outputs, tuple | list):
        cuts = [_cut(value, found, name) for value in outputs]
        if any(cut is not value for cut, value in zip(cuts, outputs, strict=True)):
            make: Any = getattr(type(outputs), "_make", type(outputs))
            return make(cuts)
    return outputs
