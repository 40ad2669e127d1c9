"""Recompiles of blocks that share their graphs: the cause is recognized, and the advice mends the model that shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from compile_sweep import WorkloadFromModel
from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.harness.source_runtime import with_own_code
from compile_sweep.schema.causes.guards import advice_on_limit, cause_of_series
from compile_sweep.schema.causes.recompiles import fold_recompiles
from compile_sweep.schema.record import Measurement
from compile_sweep.schema.settings import CompileSettings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SHORT = Protocol(compared_steps=2, min_passes=2, max_passes=2, cpu_window_s=0.0)


class Block(nn.Module):
    """A residual block with a rate of its own, and any width inside."""

    def __init__(self, rate: float, width: int) -> None:
        super().__init__()
        self.rate, self.enter, self.leave = rate, nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + dropout(self.leave(self.enter(x).relu()), self.rate)


class Kept(nn.Module):
    """A block that drops its path, or keeps it by an `nn.Identity`, as libraries do at rate 0."""

    def __init__(self, path: nn.Module) -> None:
        super().__init__()
        self.layer, self.path = nn.Linear(4, 4), path

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(self.layer(x))


def stack(blocks: list[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *blocks)


def measured(model_fn: Callable[[], nn.Module], *, limit: int = 8, scope: str = "regional") -> Measurement:
    torch._dynamo.reset()
    workload = WorkloadFromModel(
        model_fn, lambda number: {"x": torch.randn(3, 4)}, lambda model, batch: model(batch["x"]).square().mean(), num_batches=2
    )()
    settings = CompileSettings.parse(f"scope={scope},dynamic=static,backend=eager,recompile_limit={limit}")
    return measure(prepare(workload, settings, torch.device("cpu")), protocol=SHORT)


def causes_of(recompiles: list[str]) -> set[str]:
    found = (cause_of_series(series, (), recompiles) for series in fold_recompiles(recompiles))
    return {cause.name for cause in found if cause}


class Skipping(nn.Module):
    """Blocks of which some are skipped by a break in the loop over them, so that each is compiled by itself."""

    def __init__(self, blocks: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Block(0.01 * (number + 1), 8) for number in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(1).item() >= 0:
                x = block(x)
        return x


@pytest.mark.parametrize(
    ("cause", "scope", "model_fn"),
    [
        ("number of each block", "regional", lambda: stack([Block(0.01 * (number + 1), 8) for number in range(10)])),
        ("blocks of different sizes", "full", lambda: stack([Skipping([Block(0.1, number + 2) for number in range(10)])])),
    ],
)
def test_blocks_that_differ_hit_the_limit_and_a_higher_one_mends_it(
    cause: str, scope: str, model_fn: Callable[[], nn.Module]
) -> None:
    found = measured(model_fn, scope=scope)
    assert causes_of(found.recompile_reasons) == {cause}
    (hit,) = found.recompile_limit_hits
    assert "recompile_limit above" in advice_on_limit(hit, found.recompile_reasons)
    assert measured(model_fn, limit=16, scope=scope).recompile_limit_hits == []


def test_blocks_whose_width_changes_from_stage_to_stage_share_no_limit_of_graphs() -> None:
    found = measured(lambda: stack([Block(0.1, number // 2 + 2) for number in range(20)]))
    assert (found.recompile_limit_hits, found.recompile_reasons) == ([], [])
    assert found.graphs == 10


class Keeping(Skipping):
    """The same, with skipped blocks computed and left out."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.where(torch.rand(1) >= 0, block(x), x)
        return x


def test_blocks_behind_a_break_in_their_loop_are_blocks_and_no_number_that_changes() -> None:
    found = measured(lambda: stack([Skipping()]), scope="full")
    assert causes_of(found.recompile_reasons) == {"number of each block"}
    assert {text.partition(" (")[0] for text in found.recompile_reasons} == {"forward of Block"}
    mended = measured(lambda: stack([Keeping()]), scope="full")
    assert (mended.recompile_reasons, mended.graph_break_reasons, mended.graphs) == ([], [], 1)


class Counting(nn.Module):
    """A model whose probability follows its own count of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y: Tensor = self.layer(x) * (self.count / 100)
        return y


def test_a_count_of_a_model_that_is_compiled_by_itself_is_no_number_of_blocks() -> None:
    found = measured(Counting, scope="modular")
    assert causes_of(found.recompile_reasons) == {"module's counter"}
    assert {text.partition(" (")[0] for text in found.recompile_reasons} == {"Counting.forward"}


class Shifted(nn.Module):
    """A block with a mask, or with None in its place."""

    def __init__(self, mask: Tensor | None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if self.mask is None else y * self.mask


@pytest.mark.parametrize(
    "blocks_fn",
    [
        lambda: [Kept(nn.Identity()), Kept(nn.Dropout(0.1)), Kept(nn.Dropout(0.1))],
        lambda: [Shifted(None), Shifted(torch.ones(4)), Shifted(None), Shifted(torch.ones(4))],
    ],
)
def test_blocks_that_hold_different_things_take_a_graph_for_each_kind(blocks_fn: Callable[[], list[nn.Module]]) -> None:
    found = measured(lambda: stack(blocks_fn()))
    assert causes_of(found.recompile_reasons) == {"blocks of different kinds"}
    assert found.graphs == 2


def test_the_cache_of_a_decoder_gives_each_layer_a_graph_unless_it_is_switched_off() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}

    def texts(number: int) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(32, (2, 6)), "labels": torch.randint(32, (2, 6))}

    def decoder(*, use_cache: bool) -> Measurement:
        torch._dynamo.reset()
        config = LlamaConfig(**sizes, use_cache=use_cache)
        workload = WorkloadFromModel(lambda: LlamaForCausalLM(config), texts, num_batches=2)()
        settings = CompileSettings.parse("scope=regional,dynamic=static,backend=eager")
        return measure(prepare(workload, settings, torch.device("cpu")), protocol=SHORT)

    assert causes_of(decoder(use_cache=True).recompile_reasons) == {"cache of keys and values"}
    assert decoder(use_cache=False).recompile_reasons == []


@pytest.mark.parametrize("wanted", ["a tensor type", "<class 'torch.Tensor'>"])  # until torch 2.14, and since
def test_an_argument_of_changing_type_is_told_by_every_torchs_words(wanted: str) -> None:
    said = f"masked (model.py:3): expected type of 'mask' to be {wanted}, but found <class 'NoneType'>"
    assert causes_of([said]) == {"argument of changing type"}


def test_a_mask_that_is_left_out_at_times_takes_a_graph_more_and_one_that_is_always_there_does_not() -> None:
    def masked(x: Tensor, mask: Tensor | None) -> Tensor:
        return x.tanh() if mask is None else x.tanh() * mask

    def run(*masks: Tensor | None) -> Diagnostics:
        torch._dynamo.reset()
        compiled = torch.compile(masked, backend="eager")
        with capture_diagnostics() as found:
            for mask in masks:
                compiled(torch.ones(2, 3), mask)
        return found

    assert causes_of(run(torch.ones(2, 3), None).recompile_reasons) == {"argument of changing type"}
    assert run(torch.ones(2, 3), torch.ones(2, 3)).recompile_reasons == []


def test_networks_of_torchs_own_classes_share_no_limit_of_graphs_unless_they_are_of_one_size() -> None:
    torch._dynamo.reset()
    networks = [nn.Sequential(nn.Linear(4, width), nn.ELU(), nn.Linear(width, 2)) for width in (2, 3, 3, 5)]
    lazy = nn.Sequential(nn.LazyLinear(7), nn.ELU(), nn.LazyLinear(2))
    with capture_diagnostics() as found, torch._dynamo.config.patch(recompile_limit=1):
        for network in [*networks, lazy]:
            called = torch.compile(with_own_code(network.forward), backend="eager", dynamic=False)
            torch.testing.assert_close(called(torch.ones(1, 4)), network(torch.ones(1, 4)))
    assert found.recompile_limit_hits == []
    assert found.graphs == 4
