"""What batches are padded to: what goes with each dynamic strategy, and what contradicts it."""

from __future__ import annotations

from workloads.errors import SettingsError
from workloads.vocabulary import Dynamic, Padding, Scope

_NATURAL = {
    Dynamic.STATIC: Padding.MAX,
    Dynamic.AUTO: Padding.LONGEST,
    Dynamic.MARK: Padding.LONGEST,
    Dynamic.TRUE: Padding.LONGEST,
    Dynamic.BUCKETS: Padding.BUCKETS,
}

_CLASH = {
    Padding.MAX: "dynamic={dynamic} compiles one graph a length, which padding={padding} makes too many; use dynamic=buckets",
    Padding.LONGEST: "padding={padding} with dynamic={dynamic} leaves nothing dynamic; use dynamic=static or buckets",
    Padding.BUCKETS: "dynamic={dynamic} pads to its buckets and padding={padding} contradicts it; leave padding out",
}


def settled_padding(given: Padding | None, scope: Scope, dynamic: Dynamic | None) -> Padding:
    """The padding, from the one that a person named, if any, and the strategy it goes with.

    Raises:
        SettingsError: they contradict each other.
    """
    natural = Padding.MAX if dynamic is None else _NATURAL[dynamic]
    padding = given or natural
    if scope is Scope.EAGER and padding is Padding.BUCKETS:
        raise SettingsError("eager has no graph for a bucket; use padding=longest with pad_multiple=32, say")
    if scope is not Scope.EAGER and padding is not natural:
        raise SettingsError(_CLASH[natural].format(dynamic=dynamic, padding=padding))
    return padding
