"""Cases of test_workers.py: ZeRO's ranks scale rows of a weight as one process does (QK-clip)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.compare import assert_same, assert_same_bits, bits, snapshot
from tests.support.problems import set_gradients
from tests.support.ranks import gathered, run_cases
from torchopt_ext import FusedAdamW, FusedMuon, ZeroRedundancyOptimizer
from torchopt_ext.zero.ranks import Ranks

# The shape, the group, and the factors: by head, by row, or one.
WEIGHTS: dict[str, tuple[tuple[int, ...], dict[str, Any], list[float]]] = {
    "heads": ((36, 40), {"num_heads": 3}, [0.5, 1.0, 0.7]),  # cut inside short rows
    "long": ((5, 9000), {}, [0.3, 1.1, 0.9, 1.0, 0.7]),  # cut inside long rows
    "rows": ((24, 70), {}, [1 - k / 100 for k in range(24)]),
    "experts": ((6, 9, 80), {}, [0.9, 0.6]),
    "whole": ((50, 30), {}, [0.7]),
    "transposed": ((150, 70), {"algorithm": "adamw"}, [1 - k / 100 for k in range(70)]),
    "channels last": ((8, 6, 5, 5), {"algorithm": "adamw"}, [0.5, 1.0, 0.7, 1.5]),
    "gaps": ((40, 70), {"algorithm": "adamw"}, [0.5, 0.7]),  # not dense
    "vector": ((200,), {"algorithm": "adamw"}, [0.5, 3.0]),
    "empty": ((0, 5), {"algorithm": "adamw"}, [0.5]),
}
BF16 = torch.bfloat16
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {}),
    "bf16": (BF16, {"stochastic_rounding": True}),
    "masters": (BF16, {"master_weights": "fp32"}),
    "remainder, int8": (BF16, {"master_weights": "remainder", "state_dtype": "int8"}),
    "remainder8, random": (BF16, {"master_weights": "remainder8", "stochastic_rounding": True}),
    "masters, host": (BF16, {"master_weights": "fp32", "state_device": "cpu"}),
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one view": {"parameters_as_bucket_view": True},
    "balanced": {"partition": "balanced", "bucket_elements": 1000},
    "one bucket": {"partition": "balanced", "sharded_gradients": True},
}
Built = tuple[dict[str, nn.Parameter], Any]


def built(way: str, cls: Callable[..., Any] = FusedMuon, **more: Any) -> Built:
    dtype, options = WAYS[way]
    generator = torch.Generator().manual_seed(0)
    params: dict[str, nn.Parameter] = {}
    for name, (shape, _, _) in WEIGHTS.items():
        value = torch.randn(shape, generator=generator).to(dtype)
        if name == "transposed":
            value = value.t()
        if name == "channels last":
            value = value.to(memory_format=torch.channels_last)
        params[name] = nn.Parameter(value[:, ::2] if name == "gaps" else value)
    groups = [{"params": [(name, params[name])], **WEIGHTS[name][1]} for name in params]
    return params, cls(groups, lr=0.1, max_grad_norm=1.0, **options, **more)


def zero_of(way: str, how: str) -> Built:
    return built(
        way, partial(ZeroRedundancyOptimizer, optimizer_class=FusedMuon), **PARTITIONS[how]
    )


def rows_are_scaled(way: str, how: str) -> None:
    """Before the first step and between steps. The ranks send the one weight, once."""
    (expected, alone), (params, zero) = built(way), zero_of(way, how)
    world, send = dist.get_world_size(), Ranks.broadcast
    for seed in range(2):
        for name, (_, _, factors) in WEIGHTS.items():
            alone.scale_(expected[name], torch.tensor(factors))
            with mock.patch.object(Ranks, "broadcast", autospec=True, side_effect=send) as sent:
                zero.scale_(name if seed else params[name], torch.tensor(factors))
            count = sum(call.args[1].nbytes for call in sent.call_args_list)
            assert count == (params[name].nbytes if world > 1 else 0)
            assert_same_bits(params.values(), expected.values())
        for run, optimizer in ((expected, alone), (params, zero)):
            optimizer.zero_grad()
            set_gradients(run.values(), seed=seed)
            optimizer.step()
        assert_same_bits(params.values(), expected.values())
    zero.consolidate_state_dict()
    alone.scale_(expected["heads"], torch.tensor([0.3]))
    zero.scale_("heads", torch.tensor([0.3]))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="has not been consolidated"):
            pickle.dumps(zero.state_dict())  # the consolidated copy has other masters
    zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert_same(zero.state_dict()["state"], alone.state_dict()["state"])
    if world > 1 and how == "balanced":
        begins = {(part.param, part.begin) for part in zero.local.parts}
        name_of = {param: name for name, param in params.items()}
        found = gathered([(name_of[param], begin) for param, begin in begins])
        for name, row in (("heads", 40), ("long", 9000), ("transposed", 10500)):
            assert any(n == name and begin % row for of in found for n, begin in of), name


def wrong_arguments_raise_on_all_ranks(how: str) -> None:
    """With nothing changed, also where one rank alone is wrong."""
    params, zero = zero_of("masters", how)
    set_gradients(params.values())
    zero.step()
    fits, first = torch.tensor([0.5, 0.7]), dist.get_rank() == 0
    wrong: list[tuple[Any, Any, Any, str]] = [
        ("heads", torch.ones(5), ValueError, "divides the 36 rows"),
        ("heads", torch.ones(2, 2), ValueError, "expected a vector"),
        ("heads", 0.5, (TypeError, ValueError), "expected a tensor"),
        ("k", fits, ValueError, "no parameter 'k'"),
        (torch.ones(2, 3), fits, ValueError, r"no parameter of shape \(2, 3\)"),
    ]
    if dist.get_world_size() > 1:
        differ = "the ranks differ in their factors"
        both = (TypeError, ValueError)
        wrong += [
            (0 if first else "heads", fits, both, "param is 0, expected a parameter or its name"),
            ("heads", torch.ones(2, device="meta") if first else fits, both, "on meta"),
            ("heads", fits.to_sparse() if first else fits, both, "sparse_coo"),
            ("heads", fits * 1j if first else fits, both, "complex64"),
            ("heads", None if first else fits, both, "factors are None, expected a tensor"),
            ("heads", torch.ones(5) if first else fits, ValueError, "divides the 36 rows"),
            ("k" if first else "heads", fits, ValueError, "no parameter 'k'"),
            ("heads", fits if first else 2 * fits, ValueError, differ),
            ("heads" if first else "rows", fits, ValueError, differ),
        ]
    before = [*map(bits, params.values())], snapshot(zero.optim)
    for which, factors, error, message in wrong:
        with pytest.raises(error, match=message):
            zero.scale_(which, factors)
        assert ([*map(bits, params.values())], snapshot(zero.optim)) == before
    zero.scale_("heads", fits)
    assert ([*map(bits, params.values())], snapshot(zero.optim)) != before


def what_cannot_be_scaled() -> None:
    params = [nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    zero: Any = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    with pytest.raises(AttributeError, match="expected a FusedOptimizer"):
        zero.scale_(params[0], torch.ones(2))
    owned = [params[:1], *[[]] * (dist.get_world_size() - 1)]
    zero = ZeroRedundancyOptimizer(params, FusedAdamW, params_per_rank=owned)
    with pytest.raises(
        ValueError, match=r"parameter 1 of shape .* is no rank's in params_per_rank"
    ):
        zero.scale_(params[1], torch.zeros(2))
    zero.scale_(params[0], torch.zeros(2))
    assert not params[0].any() and params[1].all()


def weights_arrive_first() -> None:
    """Those of a step that its caller has not waited for, and weights that were replaced."""
    models = [nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(2)]
    params = [next(model.parameters()) for model in models]
    balanced = partial(ZeroRedundancyOptimizer, optimizer_class=FusedAdamW, partition="balanced")
    optimizers: list[Any] = [FusedAdamW(params[:1]), balanced(params[1:])]
    optimizers[1].overlap_forward(models[1])
    optimizers[1].partition.gathers = True  # as on GPUs: copied to their places after the wait
    for seed in range(2):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.data = torch.full((64, 64), 2.0)
            set_gradients([param], seed=seed)
            optimizer.step()
            optimizer.scale_(param, torch.tensor([0.5, 0.7]))
        optimizers[1].wait_for_params()  # brings nothing older
        assert_same_bits(params[1:], params[:1])
    for param, optimizer in zip(params, optimizers, strict=True):
        param.data = torch.full((64, 64), 3.0)
        optimizer.scale_(param, torch.tensor([0.5, 0.7]))
    assert_same_bits(params[1:], params[:1])


def cases() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        "torch's class and owners": what_cannot_be_scaled,
        "in flight": weights_arrive_first,
    }
    for how in ("greedy", "balanced"):
        found[f"wrong, {how}"] = partial(wrong_arguments_raise_on_all_ranks, how)
        for way in WAYS if how == "balanced" else ("fp32", "masters", "remainder8, random"):
            found[f"{how}, {way}"] = partial(rows_are_scaled, way, how)
    found["one view, masters"] = partial(rows_are_scaled, "masters", "one view")
    if dist.get_world_size() == 2:  # sums of equal gradients have one rounding
        found["one bucket, masters"] = partial(rows_are_scaled, "masters", "one bucket")
    return found


if __name__ == "__main__":
    run_cases(cases)
