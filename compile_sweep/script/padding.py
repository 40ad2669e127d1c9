"""Pads the texts of a script's batches to multiples of a length, in the calls of its modules, and cuts their outputs back.

Background: texts come padded to the longest of their batch, so hardly two batches have the same shape. Each shape costs memory
that is allocated anew, attention kernels that are planned anew, or a CUDA graph. With multiples of 64 a few shapes remain.

Arguments are recognized by the names that models of transformers give them. Padding changes nothing that training computes: the
attention mask leaves it out, and labels of -100 do not count (`ignore_index` of torch's losses).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from compile_sweep.script.discover import Shapes, Target

Call = Callable[..., Any]

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"
_DECODER = "decoder_"
_TEXT = (IDS, MASK, "token_type_ids", "position_ids", "global_attention_mask")
"""Arguments of one row for each text and one column for each token; a decoder's begin with `decoder_`."""
_IGNORED = -100
_OF_HEADS = ("attentions", "past_key_values")  # outputs whose second dimension is one of heads
_OF_TOKENS = ("start_logits", "end_logits")  # outputs of one number for each token, unlike those of one row for each text


def why_not_padded(target: Target) -> str | None:
    """Returns why the calls of a module that the discovery saw cannot be padded; None if they can, and their lengths change."""
    first: Shapes = {name.rpartition(".")[2]: shape for name, shape in (target.shapes[0] if target.shapes else {}).items()}
    changing = {name.rpartition(".")[2]: dims for name, dims in target.changing().items()}
    if 1 not in changing.get(IDS, ()):
        return f"pad_to_multiple_of pads {IDS} that change in length, and {target.name} is not called with any; leave it out"
    if len(first[IDS]) != 2 or first.get(MASK) != first[IDS]:
        return f"pad_to_multiple_of needs an {MASK} of the shape of {IDS}, and {target.name} is called without one; leave it out"
    known = {*_TEXT, LABELS, *(_DECODER + name for name in _TEXT)}
    for name, dims in changing.items():
        if (set(dims) - {0} and name not in known) or not {*dims} <= {0, 1}:
            return f"pad_to_multiple_of cannot pad {name} of {target.name}, which changes in shape too; leave it out"
    return None


class _Padding(NamedTuple):
    """What is padded of a call."""

    arguments: tuple[str, ...]
    length: int
    padded: int


class Padder:
    """Pads a module's calls.

    Args:
        multiple: Lengths become multiples of this, in tokens, as far as the model has positions. How many those are, and the
            token that pads, is read from configurations of transformers.
    """

    def __init__(self, module: nn.Module, multiple: int) -> None:
        self._multiple = multiple
        configs = [config for part in module.modules() if (config := getattr(part, "config", None)) is not None]
        self._has_decoder = bool(configs) and getattr(configs[0], "is_encoder_decoder", False) is True
        self._token = next(_numbers(configs, "pad_token_id"), 0)
        self._most = min(_numbers(configs, "max_position_embeddings"), default=None)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(module.forward).parameters.values()
        self._names = [parameter.name for parameter in parameters if parameter.kind in positional]

    def around(self, call: Call, applies: Callable[[], bool]) -> Call:
        """Returns a replacement for the module's call, which pads where it applies."""

        def padded_call(*args: Any, **kwargs: Any) -> Any:
            found = self._paddings(args, kwargs) if applies() else []
            if not found:
                return call(*args, **kwargs)
            args, kwargs = self._replaced(args, kwargs, found, self._padded)
            return _cut(call(*args, **kwargs), found)

        return padded_call

    def without_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call as they are padded, tensors that are padded without their values."""
        return self._replaced(
            args,
            kwargs,
            self._paddings(args, kwargs),
            lambda _, tensor, columns: tensor.new_empty((len(tensor), tensor.size(1) + columns), device="meta"),
        )

    def _paddings(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Padding]:
        """Returns what to pad: a text and, of a model with a decoder, the text that it learns to write."""
        given = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        ids, mask = given.get(IDS), given.get(MASK)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not isinstance(mask, Tensor) or mask.shape != ids.shape:
            return []
        texts = [(IDS, (*_TEXT, *(() if self._has_decoder else (LABELS,))))]
        if self._has_decoder:
            leader = LABELS if given.get(LABELS) is not None else _DECODER + IDS
            texts.append((leader, (LABELS, *(_DECODER + one for one in _TEXT))))
        return [found for leader, names in texts if (found := self._padding(given, leader, names)) is not None]

    def _padding(self, given: Mapping[str, Any], leader: str, names: Sequence[str]) -> _Padding | None:
        if (length := _columns(leader, given.get(leader))) is None:
            return None
        padded = -(-length // self._multiple) * self._multiple
        padded = padded if self._most is None else max(length, min(padded, self._most))
        return _Padding(tuple(name for name in names if _columns(name, given.get(name)) == length), length, padded)

    def _replaced(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        found: Sequence[_Padding],
        padded: Callable[[str, Tensor, int], Tensor],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        columns = {name: one.padded - one.length for one in found for name in one.arguments if one.padded > one.length}
        named = zip([*self._names, *[""] * len(args)], args, strict=False)
        return (
            tuple(padded(name, value, columns[name]) if name in columns else value for name, value in named),
            {name: padded(name, value, columns[name]) if name in columns else value for name, value in kwargs.items()},
        )

    def _padded(self, name: str, tensor: Tensor, columns: int) -> Tensor:
        value = _IGNORED if name == LABELS else self._token if name.endswith(IDS) else 0
        return nn.functional.pad(tensor, (0, columns), value=value)


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
        of_text = found[0] if name.startswith("encoder_") else found[-1]
        has_tokens = (outputs.dim() > 2 and not name.endswith(_OF_HEADS)) or (outputs.dim() == 2 and name in _OF_TOKENS)
        is_padded = has_tokens and outputs.size(1) == of_text.padded != of_text.length
        return outputs.narrow(1, 0, of_text.length) if is_padded else outputs
    if isinstance(outputs, MutableMapping):  # such as ModelOutput of transformers
        for key, value in list(outputs.items()):
            if (cut := _cut(value, found, str(key))) is not value:
                outputs[key] = cut
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        for one in fields(outputs):
            if (cut := _cut(value := getattr(outputs, one.name), found, one.name)) is not value:
                setattr(outputs, one.name, cut)
    elif isinstance(outputs, tuple | list):
        cuts = list(_all_cut(outputs, found, name))
        if any(cut is not value for cut, value in zip(cuts, outputs, strict=True)):
            make: Any = getattr(type(outputs), "_make", type(outputs))
            return make(cuts)
    return outputs


def _all_cut(outputs: Sequence[Any], found: Sequence[_Padding], name: str) -> Iterator[Any]:
    for value in outputs:
        yield _cut(value, found, name)
