"""Models with a graph break caused by a tensor (its value, size or kind), and the same models mended."""

from __future__ import annotations

import copy
from typing import Any

import torch
from faulty_models import Case, Net, plain, with_assert_statement, with_layers_in_turn, with_mask, with_rows, with_tensor_kept
from torch import Tensor, nn


def with_item(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.last = y.sum().item()
    return y


def with_branch(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    if y.sum() > 0:
        y = y * 2
    return y


def with_rounds_until_it_converges(net: Net, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for _ in range(20):
        before, y = y, torch.tanh(net.layer(y) + x)
        if (y - before).norm() < 0.1:
            break
    return y


def with_fixed_rounds(net: Net, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for _ in range(4):
        y = torch.tanh(net.layer(y) + x)
    return y


def with_where(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return torch.where(y.sum() > 0, y * 2, y)


def with_sparse(net: Net, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse(), net.layer(x))


def with_dense(net: Net, x: Tensor) -> Tensor:
    return torch.eye(4) @ net.layer(x)


def with_packed(net: Net, x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(net.layer(x)[None], torch.tensor([4]), batch_first=True).data


def with_deepcopy(net: Net, x: Tensor) -> Tensor:
    return net.layer(copy.deepcopy(x))


def with_clone(net: Net, x: Tensor) -> Tensor:
    return net.layer(x.clone())


def with_allclose(net: Net, x: Tensor) -> Tensor:
    weights = net.layer(x).softmax(-1)
    assert torch.allclose(weights.sum(-1), torch.ones(len(x)), atol=1e-3), "not a distribution"
    return weights


def with_isclose(net: Net, x: Tensor) -> Tensor:
    weights = net.layer(x).softmax(-1)
    assert torch.isclose(weights.sum(-1), torch.ones(len(x)), atol=1e-3).all(), "not a distribution"
    return weights


def with_equal(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) if torch.equal(x, x.round()) else net.layer(2 * x)


def with_equal_kept(net: Net, x: Tensor) -> Tensor:
    return torch.where((x == x.round()).all(), net.layer(x), net.layer(2 * x))


def with_counted_classes(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) @ nn.functional.one_hot(torch.arange(8)).float()


def with_known_classes(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) @ nn.functional.one_hot(torch.arange(8), num_classes=8).float()


def with_sparse_made_there(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + torch.sparse_coo_tensor([[0], [0]], [1.0], (4, 8)).to_dense()


def with_zeros(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + torch.zeros(4, 8)


def with_nested(net: Net, x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([net.layer(x)])


def with_copy(net: Net, x: Tensor) -> Tensor:
    return net.layer(copy.copy(x))


class Wrapped(torch.Tensor):
    """Contains another tensor, without declaring it."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[return-value]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(one.inner if isinstance(one, Wrapped) else one for one in args), **(kwargs or {}))


class Flattened(Wrapped):
    """Contains another tensor, and declares it."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Flattened:
        return Flattened(inner["inner"])


_wrapped, _flattened = Wrapped(torch.ones(4, 8)), Flattened(torch.ones(4, 8))


class Labeled(Tensor):
    """A subclass that only has another name, as images with boxes have."""


def with_label(net: Net, x: Tensor) -> Tensor:
    return net.layer(x.as_subclass(Labeled)).as_subclass(Tensor)  # type: ignore[no-untyped-call]


def with_wrapped(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + _wrapped


def with_wrapped_made_there(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + Wrapped(x.detach())


def with_flattened(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + _flattened


def with_range_of_a_tensor(net: Net, x: Tensor) -> Tensor:
    for _ in range(x[:, 0].abs().long().max()):  # type: ignore[arg-type]  # a tensor is an index
        x = net.layer(x)
    return x


def with_hash_of_a_tensor(net: Net, x: Tensor) -> Tensor:
    net.seen.add(hash(x))
    return net.layer(x)


def with_check(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    if torch.isnan(y).any():
        raise ValueError("not a number")
    return y


def with_check_in_the_graph(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    torch._assert_async(~torch.isnan(y).any())
    return y


def with_assert_of_not(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    assert not torch.isnan(y).any(), "not a number"
    return y


def with_assert_of_all(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    assert torch.isfinite(y).all(), "not finite"
    return y


def with_ctc_loss(net: Net, x: Tensor) -> Tensor:
    scores = net.layer(x).log_softmax(-1)[:, None]
    loss: Tensor = nn.functional.ctc_loss(scores, torch.ones(1, 2).long(), torch.tensor([4]), torch.tensor([1]))
    return loss


_encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


_stack = nn.TransformerEncoder(_encoder, 1)


def with_mask_looked_at(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _stack(net.layer(x)[None], nn.Transformer.generate_square_subsequent_mask(4))
    return y


def with_mask_declared(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _stack(net.layer(x)[None], nn.Transformer.generate_square_subsequent_mask(4), is_causal=True)
    return y


def with_set_of_tensors(net: Net, x: Tensor) -> Tensor:
    net.seen.add(x)  # type: ignore[arg-type]
    return net.layer(x)


def with_resized(net: Net, x: Tensor) -> Tensor:
    space = x.new_empty(0)
    return net.layer(x) + space.resize_(4, 8).zero_()


def with_shared_memory(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x)
    y.detach().share_memory_()
    return y


class Scaled(torch.autograd.Function):
    """Reads the value of a tensor while it is traced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.detach().abs().max().item()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def with_value_in_a_function(net: Net, x: Tensor) -> Tensor:
    y: Tensor = Scaled.apply(net.layer(x))  # type: ignore[no-untyped-call]
    return y


def with_assertion(net: Net, x: Tensor) -> Tensor:
    torch._assert(x.abs().sum() < 1e9, "too large")  # type: ignore[arg-type]  # a tensor is a condition
    return net.layer(x)


_averaging, _moving = nn.BatchNorm1d(8, momentum=None), nn.BatchNorm1d(8, momentum=0.1)


def with_average_over_all_batches(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _averaging(net.layer(x))
    return y


def with_moving_average(net: Net, x: Tensor) -> Tensor:
    y: Tensor = _moving(net.layer(x))
    return y


def with_queue(net: Net, x: Tensor) -> Tensor:
    """A queue of keys, as contrastive learning has it."""
    y = net.layer(x)
    start = int(net.steps)
    net.queue[start : start + 4] = y.detach()
    net.steps.fill_((start + 4) % 16)
    return y


def with_queue_of_tensors(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.queue = net.queue.index_copy(0, (net.steps.long() + torch.arange(4)) % len(net.queue), y.detach())
    net.steps = (net.steps + 4) % len(net.queue)
    return y


def with_mask_of_lengths(net: Net, x: Tensor) -> Tensor:
    lengths = x[:, 0].abs().long()
    return net.layer(x) * (torch.arange(int(lengths.max())) < lengths[:, None]).sum()


def with_mask_of_a_shape(net: Net, x: Tensor) -> Tensor:
    lengths = x[:, 0].abs().long()
    return net.layer(x) * (torch.arange(x.size(1)) < lengths[:, None]).sum()


def with_repeats(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).repeat_interleave(torch.arange(4), dim=0)


def with_known_repeats(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).repeat_interleave(torch.arange(4), dim=0, output_size=6)


def with_bins(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + torch.bincount(x[0].abs().long(), minlength=8)[:8]


def with_counted_ids(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + nn.functional.one_hot(x[0].abs().long(), num_classes=8).sum(0)


def with_sorted_rows(net: Net, x: Tensor) -> Tensor:
    return torch.stack(sorted(net.layer(x), key=lambda row: float(row[0])))


def with_rows_in_order(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return y[y[:, 0].argsort()]


def with_dropout_of_a_buffer(net: Net, x: Tensor) -> Tensor:
    return nn.functional.dropout(net.layer(x), p=net.heat / 4)  # type: ignore[arg-type]  # a tensor in place of a number


def with_noise_of_a_buffer(net: Net, x: Tensor) -> Tensor:
    return torch.normal(0.0, net.heat, x.shape) + net.layer(x)  # type: ignore[call-overload]  # a tensor in place of a number


def with_dropout_of_tensors(net: Net, x: Tensor) -> Tensor:
    x, p = net.layer(x), net.heat / 4
    return x * (torch.rand_like(x) >= p) / (1 - p)


def with_noise_of_tensors(net: Net, x: Tensor) -> Tensor:
    return torch.randn_like(x) * net.heat + net.layer(x)


def with_order_as_a_list(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return y[y[:, 0].argsort().tolist()]


def with_weight_by_numpy(net: Net, x: Tensor) -> Tensor:
    weight = 1 / (1 + x.detach().numpy() ** 2).mean()
    return net.layer(x) * float(weight)


def with_weight_by_torch(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) / (1 + x.detach() ** 2).mean()


def with_setup_told_by_a_buffer(net: Net, x: Tensor) -> Tensor:
    if not net.steps:
        net.heat.copy_(x.std())
        net.steps.fill_(1)
    return net.layer(x) / net.heat


def with_setup_told_by_a_number(net: Net, x: Tensor) -> Tensor:
    if net.steps.item() == 0:
        net.heat.copy_(x.std())
        net.steps.fill_(1)
    return net.layer(x) / net.heat


def with_setup_told_by_a_bool(net: Net, x: Tensor) -> Tensor:
    if net.flag:
        net.heat.copy_(x.std())
        net.flag = False
    return net.layer(x) / net.heat


def with_random_span_cut(net: Net, x: Tensor) -> Tensor:
    """As SpecAugment, which is called in the forward."""
    start = int(torch.randint(0, 4, (1,)))
    x = x.clone()
    x[:, start : start + 3] = 0
    return net.layer(x)


def with_random_span_hidden(net: Net, x: Tensor) -> Tensor:
    at, start = torch.arange(x.size(1)), torch.randint(0, 4, (1,))
    return net.layer(x.masked_fill((at >= start) & (at < start + 3), 0))


def with_hardest_of_some(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return torch.stack([row[row > 0].max() for row in torch.cdist(y, y)])


def with_hardest_by_a_mask(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    apart = torch.cdist(y, y)
    return apart.masked_fill(~(apart > 0), -torch.inf).amax(1)


def with_rows_assigned(net: Net, x: Tensor) -> Tensor:
    """Keeps the smaller distance, as the sampling of farthest points does."""
    y, nearest = net.layer(x), torch.ones_like(x)
    mask = y < nearest
    nearest[mask] = y[mask]
    return nearest


def with_rows_chosen(net: Net, x: Tensor) -> Tensor:
    y, nearest = net.layer(x), torch.ones_like(x)
    return torch.where(y < nearest, y, nearest)


def with_least_squares(net: Net, x: Tensor) -> Tensor:
    weights = torch.linalg.lstsq(x.mT, net.layer(x).mT).solution
    return net.layer(x) * weights.mean()


def with_triangular_solution(net: Net, x: Tensor) -> Tensor:
    q, r = torch.linalg.qr(x.mT)
    weights = torch.linalg.solve_triangular(r, q.mT @ net.layer(x).mT, upper=True)
    return net.layer(x) * weights.mean()


def with_address(net: Net, x: Tensor) -> Tensor:
    if net.last != x.data_ptr():
        net.last = x.data_ptr()
    return net.layer(x)


def with_size_of_another(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return torch.empty(0).resize_as_(y).copy_(y)


def with_empty_output(net: Net, x: Tensor) -> Tensor:
    return net.layer(torch.mul(x, 2, out=torch.empty(0)))


def with_output_of_its_size(net: Net, x: Tensor) -> Tensor:
    return net.layer(torch.mul(x, 2, out=torch.empty_like(x)))


def with_bytes_of_a_storage(net: Net, x: Tensor) -> Tensor:
    net.last = x.untyped_storage().nbytes()
    return net.layer(x)


def with_bytes_of_a_tensor(net: Net, x: Tensor) -> Tensor:
    net.last = x.nbytes
    return net.layer(x)


def with_not_of_a_tensor(net: Net, x: Tensor) -> Tensor:
    net.last = not x.isnan().any()
    return net.layer(x)


def with_inverted_tensor(net: Net, x: Tensor) -> Tensor:
    net.last = ~x.isnan().any()
    return net.layer(x)


def with_lengths_marked_one_by_one(net: Net, x: Tensor) -> Tensor:
    lengths, mask = x.abs().sum(1).long().clamp(max=8), torch.zeros(4, 8, dtype=torch.bool)
    for row, length in zip(mask, lengths, strict=True):
        row.narrow(0, length.item(), 8 - length.item()).fill_(True)
    return net.layer(x).masked_fill(mask, 0)


def with_lengths_marked_at_once(net: Net, x: Tensor) -> Tensor:
    lengths = x.abs().sum(1).long().clamp(max=8)
    return net.layer(x).masked_fill(torch.arange(8) >= lengths[:, None], 0)


def with_runs_by_unique(net: Net, x: Tensor) -> Tensor:
    _, runs = torch.unique_consecutive(x[:, 0] > 0, return_inverse=True)
    return torch.zeros_like(x).index_add(0, runs, net.layer(x))


def with_groups_by_unique(net: Net, x: Tensor) -> Tensor:
    _, runs = (x[:, 0] > 0).unique(return_inverse=True)
    return torch.zeros_like(x).index_add(0, runs, net.layer(x))


def with_runs_by_where_one_begins(net: Net, x: Tensor) -> Tensor:
    ids = x[:, 0] > 0
    starts = torch.cat([torch.ones_like(ids[:1], dtype=torch.bool), ids[1:] != ids[:-1]])
    return torch.zeros_like(x).index_add(0, starts.cumsum(0) - 1, net.layer(x))


BREAKS_OF_VALUES = [
    Case("value of a tensor", with_lengths_marked_one_by_one, with_lengths_marked_at_once),
    Case("unique values", with_runs_by_unique, with_runs_by_where_one_begins),
    Case("unique values", with_groups_by_unique, with_runs_by_where_one_begins),
    Case("least squares", with_least_squares, with_triangular_solution),
    Case("identity of an object", with_address, plain),
    Case("memory of a tensor", with_size_of_another, plain),
    Case("memory of a tensor", with_empty_output, with_output_of_its_size),
    Case("memory of a tensor", with_bytes_of_a_storage, with_bytes_of_a_tensor),
    Case("tensor in place of a number", with_not_of_a_tensor, with_inverted_tensor),
    Case("output of unknown size", with_rows_assigned, with_rows_chosen),
    Case("value of a tensor", with_random_span_cut, with_random_span_hidden),
    Case("output of unknown size", with_hardest_of_some, with_hardest_by_a_mask),
    Case("data-dependent branch", with_setup_told_by_a_buffer, with_setup_told_by_a_bool),
    Case("value of a tensor", with_setup_told_by_a_number, with_setup_told_by_a_bool),
    Case("numpy and scipy", with_weight_by_numpy, with_weight_by_torch),
    Case("value of a tensor", with_order_as_a_list, with_rows_in_order),
    Case("tensor in place of a number", with_dropout_of_a_buffer, with_dropout_of_tensors),
    Case("tensor in place of a number", with_noise_of_a_buffer, with_noise_of_tensors),
    Case("tensors compared by Python", with_sorted_rows, with_rows_in_order),
    Case("assertion by a function", with_assertion, with_assert_statement),
    Case("average over all batches", with_average_over_all_batches, with_moving_average),
    Case("value of a tensor", with_queue, with_queue_of_tensors),
    Case("value of a tensor", with_mask_of_lengths, with_mask_of_a_shape),
    Case("repeats that are a tensor", with_repeats, with_known_repeats),
    Case("number of bins", with_bins, with_counted_ids),
    Case("causal mask", with_mask_looked_at, with_mask_declared),
    Case("set of tensors", with_set_of_tensors, plain),
    Case("memory of a tensor", with_resized, plain),
    Case("memory of a tensor", with_shared_memory, plain),
    Case("value of a tensor", with_value_in_a_function, plain),
    Case("data-dependent branch", with_check, with_check_in_the_graph),
    Case("data-dependent branch", with_assert_of_not, with_assert_of_all),
    Case("CTC loss", with_ctc_loss, plain),
    Case("value of a tensor", with_range_of_a_tensor, with_layers_in_turn),
    Case("identity of an object", with_hash_of_a_tensor, plain),
    Case("value of a tensor", with_item, with_tensor_kept),
    Case("data-dependent branch", with_rounds_until_it_converges, with_fixed_rounds),
    Case("data-dependent branch", with_branch, with_where),
    Case("output of unknown size", with_rows, with_mask),
    Case("comparison of whole tensors", with_allclose, with_isclose),
    Case("comparison of whole tensors", with_equal, with_equal_kept),
    Case("number of classes", with_counted_classes, with_known_classes),
    Case("sparse tensor", with_sparse_made_there, with_zeros),
    Case("nested tensor", with_nested, plain),
    Case("value that is not a tensor", with_copy, with_clone),
    Case("tensor subclass", with_label, plain),
    Case("tensor subclass", with_wrapped, with_flattened),
    Case("tensor subclass", with_wrapped_made_there, with_flattened),
    Case("sparse tensor", with_sparse, with_dense),
    Case("packed sequences", with_packed, plain),
    Case("copy of a tensor by Python", with_deepcopy, with_clone),
]
