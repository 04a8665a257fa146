"""ZeroRedundancyOptimizer: unusual calls around a sharded optimizer's steps give right results
or clear errors."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_cases import counted_calls, run_cases
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_faults_common import furthest, layers

from torchopt_ext import FusedAdamW
from torchopt_ext.trainer.zero_container import ZeroOptimizersContainer
from torchopt_ext.zero import ZeroRedundancyOptimizer

SGD = {"lr": 0.5, "momentum": 0.9}
BUCKETS: dict[str, Any] = {"greedy": {}, "balanced": {"bucket_elements": 64}}
ROUNDING = 1e-5  # from averages of equal gradients, and from other orders of summing


def sharded(params: Any, **kwargs: Any) -> Any:
    return ZeroRedundancyOptimizer(
        params,
        torch.optim.SGD,
        partition="balanced",
        sharded_gradients=True,
        bucket_elements=64,
        **{**SGD, **kwargs},
    )


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise MemoryError("as if memory were short")


def against_plain(steps: Callable[[nn.Sequential, Any], None]) -> None:
    """Sharded training ends where plain training ends. All ranks have the same data."""
    model, twin = layers(4), layers(4)
    steps(model, sharded(model.parameters()))
    steps(twin, torch.optim.SGD(twin.parameters(), **SGD))
    assert furthest(model, twin) <= ROUNDING


def failed_backward() -> None:
    def steps(model: nn.Sequential, optimizer: Any) -> None:
        data = torch.ones(2, 70, requires_grad=True)
        for segment in (lambda x: x, lambda x: checkpoint(model[1], x, use_reentrant=True)):
            loss = segment(model[2:](Failing.apply(model[:2](data)))).mean()
            with pytest.raises(MemoryError):
                loss.backward()
            for again in range(3):
                if again:  # the first pass adds to what the failed pass left
                    optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()

    against_plain(steps)


def reentrant_and_tied() -> None:
    def steps(model: nn.Sequential, optimizer: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.ones(2, 70, requires_grad=True)
            for _ in range(2):  # the same layers twice, in separate segments
                x = checkpoint(model[:2], x, use_reentrant=True)
            model[2:](x).square().mean().backward()
            optimizer.step()

    against_plain(steps)


def without_zero_grad() -> None:
    model = layers(4)
    optimizer = sharded(model.parameters())
    data = torch.ones(2, 70)
    model(data).sum().backward()
    optimizer.step()
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"call the optimizer's zero_grad\(\)"):
        model(data).sum().backward()
    optimizer.zero_grad()
    model(data).sum().backward()
    optimizer.step()


def other_layout() -> None:
    """Replaces memory by another order of dimensions, and then by another shape."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 130, 3), nn.Conv2d(130, 8, 3))
    twin = copy.deepcopy(model)
    zero = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.AdamW, partition="balanced", lr=0.1
    )
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for step in range(3):
        for net, optimizer in ((model, zero), (twin, plain)):
            if step == 1:
                net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            optimizer.zero_grad()
            net(torch.ones(1, 8, 9, 9)).sum().backward()
            optimizer.step()
    assert furthest(model, twin) <= ROUNDING
    weight = model[0].weight
    weight.data = torch.zeros(131, 8, 3, 3)
    weight.grad = torch.ones(131, 8, 3, 3)
    with pytest.raises(RuntimeError, match=r"'0.weight' of shape \(131, 8, 3, 3\), .* had shape"):
        zero.step()


def copied_with_scheduler() -> None:
    model = layers(4)
    zero = sharded(model.parameters())
    torch.optim.lr_scheduler.StepLR(zero, 1)
    data = torch.ones(2, 70)
    model(data).sum().backward()
    twin, second = copy.deepcopy((model, zero))
    second.step()
    assert furthest(model, layers(4)) == 0
    assert furthest(twin, layers(4)) > 0
    zero.step()
    assert furthest(model, twin) == 0


def closure_replaces_memory() -> None:
    model = layers(4)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, **SGD
    )

    def closure() -> Tensor:
        for param in model.parameters():
            param.data = param.data.clone()
        zero.zero_grad()
        loss = model(torch.ones(2, 70)).sum()
        loss.backward()
        return loss

    zero.step(closure)
    twin = layers(4)
    plain = torch.optim.SGD(twin.parameters(), **SGD)
    twin(torch.ones(2, 70)).sum().backward()
    plain.step()
    assert furthest(model, twin) <= ROUNDING


def clipped_copies() -> None:
    """Gradients with permuted dimensions are copied to shards. Clipping must reach the copies."""
    torch.manual_seed(0)
    weight = torch.randn(10, 80, 3, 3).contiguous(memory_format=torch.channels_last)
    found = []
    for plain in (False, True):
        param = nn.Parameter(weight.clone(memory_format=torch.preserve_format))
        if plain:
            optimizer: Any = torch.optim.SGD([param], lr=0.5)
        else:
            optimizer = ZeroRedundancyOptimizer(
                [param], torch.optim.SGD, partition="balanced", lr=0.5
            )
        param.grad = torch.arange(7200.0).view(10, 80, 3, 3)
        if plain:
            nn.utils.clip_grad_norm_([param], 1.0)
        else:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        found.append(param.detach())
    assert (found[0] - found[1]).abs().max() <= ROUNDING


def foreign_state() -> None:
    """Reading the state of other ranks' parameters changes nothing."""
    model = layers(4)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **SGD)
    model(torch.ones(2, 70)).sum().backward()
    zero.step()
    if dist.get_rank() == 0:
        for param in model.parameters():
            _ = zero.state[param]
        zero.state["count"] = 0  # not by parameter
    zero.consolidate_state_dict(to=0)
    assert dist.get_rank() != 0 or zero.state["count"] == 0
    assert dist.get_rank() != 0 or len(zero.state_dict()["state"]) == 8


def torchs_hook_in_a_subgroup() -> None:
    """torch's hooks, which take a global rank for a rank of the group, raise before they step."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    params = [*layers(1).parameters()]
    zero = ZeroRedundancyOptimizer(
        params, FusedAdamW, process_group=groups[dist.get_rank()], overlap_with_ddp=True
    )
    zero._overlap_info.params_per_bucket.append(params)
    raises = pytest.raises(RuntimeError, match="takes global ranks")
    with raises if dist.get_rank() else nullcontext():
        zero._init_zero_for_overlap()


def without_a_group() -> None:
    """Uses an optimizer after its group was destroyed, and builds one on a rank outside."""
    model, group, first = layers(4), dist.new_group(), dist.new_group([0])
    zero = ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, process_group=group)
    plain = FusedAdamW(model.parameters(), process_group=group, max_grad_norm=1.0)
    model(torch.ones(2, 70)).sum().backward()
    dist.destroy_process_group(group)
    for call in (zero.step, zero.consolidate_state_dict, plain.step):
        with pytest.raises(RuntimeError, match="the process group was destroyed"):
            call()
    assert furthest(model, layers(4)) == 0
    outside = pytest.raises((TypeError, ValueError), match=r"rank 1 is not in|has this rank")
    for build in (ZeroRedundancyOptimizer, lambda *args, **options: FusedAdamW(args[0], **options)):
        with outside if dist.get_rank() else nullcontext():
            build(layers(1).parameters(), FusedAdamW, process_group=first)


def second_optimizer() -> None:
    """A rejected optimizer leaves no hooks. A second optimizer of the same parameters raises."""
    model = layers(4)
    with pytest.raises(ValueError, match="learning rate"):
        sharded(model.parameters(), lr=-1.0)
    data = torch.ones(2, 70)
    model(data).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    first = sharded(model.named_parameters())
    second = sharded(model.named_parameters())
    with pytest.raises(RuntimeError, match="has taken the gradient of parameter '3"):
        model(data).sum().backward()
    del first, second
    model.zero_grad()


def load_refused_on_one_rank() -> None:
    model = layers(4)
    zero = ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, lr=0.1)
    plain = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2, 70)).sum().backward()
    plain.step()
    state = plain.state_dict()
    if dist.get_rank() == 1:
        state["state"][0] = {"step": torch.tensor(1.0)}
    with pytest.raises((KeyError, ValueError), match="exp_avg"):
        zero.load_state_dict(state)
    assert (zero.param_groups[0]["lr"], len(zero.optim.state)) == (0.1, 0)


def group_refused() -> None:
    """Adds a group that the local optimizer rejects, which must leave all ranks unchanged."""
    params = [nn.Parameter(torch.ones(70, dtype=torch.bfloat16)) for _ in range(4)]
    zero = ZeroRedundancyOptimizer(params, FusedAdamW, master_weights="remainder")
    more = nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="bias_correction"):
        zero.add_param_group({"params": [more], "bias_correction": "no"})
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1


def gathers_two_buckets() -> None:
    """At most two buckets of parameters are in flight at a time, as on NCCL."""
    model = layers(6)
    zero = sharded(model.parameters())
    zero.partition.gathers = True
    most = 0
    gather = zero.partition._gather

    def counted(bucket: Any) -> Any:
        nonlocal most
        most = max(most, len(zero.partition._updates_in_flight) + 1)
        return gather(bucket)

    zero.partition._gather = counted
    model(torch.ones(2, 70)).sum().backward()
    zero.step()
    assert len(zero.partition.all_buckets) > most == 2


def masters_from_fp32() -> None:
    """Takes masters from full fp32 weights, then compares with the plain optimizer."""
    exact = layers(2)
    for partition in ("greedy", "balanced"):
        one, other = (copy.deepcopy(exact).to(torch.bfloat16) for _ in range(2))
        for model in (one, other):
            for param in model.parameters():
                param.data.zero_()
        zero: Any = ZeroRedundancyOptimizer(
            one.named_parameters(), FusedAdamW, partition=partition, master_weights="remainder"
        )
        plain = FusedAdamW(other.named_parameters(), master_weights="remainder")
        partial = {"0.weight": exact[0].weight.detach()}
        with pytest.raises(ValueError, match="is missing"):
            zero.refresh_masters(from_=partial)
        assert not any(p.any() for p in one.parameters())
        for optimizer, model in ((zero, one), (plain, other)):
            optimizer.refresh_masters(from_=exact.state_dict())
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.5)
            optimizer.step()
        assert furthest(one, other) == 0
        zero.max_grad_norm = 0.25
        assert zero.optim.max_grad_norm == 0.25


def written_weights() -> None:
    """Masters follow what user code writes to parameters, and nothing else."""
    for partition, gathers in (("greedy", False), ("balanced", False), ("balanced", True)):
        one, other = (layers(3).to(torch.bfloat16) for _ in range(2))
        zero: Any = ZeroRedundancyOptimizer(
            one.parameters(), FusedAdamW, partition=partition, master_weights="fp32", lr=0.01
        )
        zero.partition.gathers = gathers
        plain = FusedAdamW(other.parameters(), master_weights="fp32", lr=0.01)
        for step in range(8):
            for optimizer, model in ((zero, one), (plain, other)):
                for param in model.parameters():
                    if step in (2, 5):
                        param.detach()[::2] *= -0.5
                    elif step == 3:
                        param.data = param.data + 0.25
                    param.grad = torch.full_like(param, 0.5)
                with counted_calls(torch.ops.aten.where.self) as calls:
                    optimizer.step()
                assert bool(calls) <= (step in (2, 3, 5)), (partition, step)
            assert furthest(one, other) == 0


def codes_of_other_layouts() -> None:
    """Loads codes for parts of parameters that cannot hold codes and get floats instead."""
    torch.manual_seed(0)
    module = nn.Conv2d(70, 6, 3, bias=False)
    module.weight.grad = torch.randn(6, 70, 3, 3) * torch.logspace(0, 5, 6)[:, None, None, None]
    codes = FusedAdamW(module.parameters(), state_dtype="int8")
    codes.step()
    floats = FusedAdamW(module.parameters())
    floats.load_state_dict(codes.state_dict())
    expected = floats.state[module.weight]
    for kind in ("channels_last", "double"):
        for partition in ("greedy", "balanced"):
            other: Any = copy.deepcopy(module)
            if kind == "double":
                other.double()
            else:
                other.to(memory_format=torch.channels_last)
            zero: Any = ZeroRedundancyOptimizer(
                other.parameters(), FusedAdamW, partition=partition, **BUCKETS[partition]
            )
            zero.load_state_dict(codes.state_dict())
            zero.consolidate_state_dict()
            if dist.get_rank() == 0:
                state = zero.state_dict()["state"][0]
                for name in ("exp_avg", "exp_avg_sq"):
                    assert state[name].float().equal(expected[name]), (kind, partition, name)
    adamw: Any = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW)
    with pytest.raises(AttributeError, match="a AdamW, expected a FusedOptimizer"):
        adamw.max_grad_norm = 1.0


def by_another_callable() -> None:
    """Norms and skips do not depend on the callable that makes the local optimizer."""

    def made(make: Any, bad: bool, **options: Any) -> tuple[nn.Module, Any]:
        model = layers(2)
        zero: Any = ZeroRedundancyOptimizer(model.parameters(), make, lr=0.1, **options)
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, number + 1.0)
            if bad and number == 0:
                param.grad[0] = torch.inf
        zero.skip_nonfinite = zero.skip_nonfinite or bad
        zero.step()
        return model, zero

    clips = {"max_grad_norm": 0.01, "eps": 1e-2}
    makes: dict[str, Any] = {
        "partial": partial(FusedAdamW, **clips),
        "function": lambda params, **options: FusedAdamW(params, **clips, **options),
    }
    for bad in (False, True):
        model, zero = made(FusedAdamW, bad, **clips)
        for name, make in makes.items():
            other, its = made(make, bad)
            assert furthest(model, other) == 0, name
            assert bad or its.control.grad_norm.equal(zero.control.grad_norm), name
            assert bool(its.control.skip) == bad, name
    codes = partial(FusedAdamW, state_dtype="int8")
    wrapped = lambda params, **options: codes(params, **options)  # noqa: E731
    with pytest.raises(ValueError, match="give state_dtype to ZeroRedundancyOptimizer"):
        ZeroRedundancyOptimizer(layers(4).parameters(), wrapped)


def complex_gradients_are_clipped() -> None:
    both = [[nn.Parameter(torch.ones(5, dtype=torch.complex64)) for _ in range(2)] for _ in "ab"]
    for params in both:
        for param in params:
            param.grad = torch.full_like(param, 3 - 4j)
    zero: Any = ZeroRedundancyOptimizer(both[0], torch.optim.SGD, lr=1.0)
    norm = zero.clip_grad_norm_(1.0)
    zero.step()
    expected = nn.utils.clip_grad_norm_(both[1], 1.0)
    torch.optim.SGD(both[1], lr=1.0).step()
    assert abs(norm.item() - expected.item()) <= ROUNDING
    assert all((a - b).abs().max() <= ROUNDING for a, b in zip(*both, strict=True))


def unequal_arguments() -> None:
    """One rank passes another value of an argument that all ranks must share."""
    here = dist.get_rank() == 1
    differ = "the ranks differ in their parameters and arguments"
    for name, common, other in (
        ("partition", "greedy", "balanced"),
        ("bucket_elements", 64, 128),
        ("max_grad_norm", 1.0, None),
        ("optimizer_class", FusedAdamW, torch.optim.AdamW),
        ("parameters_as_bucket_view", False, True),
        ("overlap_with_ddp", False, True),
        ("params_per_rank", [0, 1], [1, 0]),
        ("lr", 0.1, 0.2),
        ("state_dtype", None, torch.bfloat16),
        ("weight_decay", 0.1, 0.2),
    ):
        params = list(layers(1).parameters())
        given: dict[str, Any] = {"optimizer_class": FusedAdamW, "lr": 0.1}
        given[name] = other if here else common
        if name == "bucket_elements":
            given["partition"] = "balanced"
        if name == "weight_decay":
            params[0:] = [{"params": params.copy(), name: given.pop(name)}]
        if name == "params_per_rank":
            given[name] = [[params[i]] for i in given[name]]
        with pytest.raises(ValueError, match=f"{differ}[^$]*{name}="):
            ZeroRedundancyOptimizer(params, **given)
    optimizer = ZeroRedundancyOptimizer(layers(1).parameters(), FusedAdamW)
    with pytest.raises(ValueError, match="differ in their arguments"):
        optimizer.consolidate_state_dict(to=99 if here else 0)


def trainers_container_loads_its_shards() -> None:
    """Loads a rank's own state dict, also through torch's DCP, and one that is wrong on rank 1."""
    for partition in ("greedy", "balanced"):
        model, twin = layers(4), layers(4)
        options = {"lr": torch.tensor(0.1)}
        containers = [
            ZeroOptimizersContainer([each], FusedAdamW, options, partition=partition)
            for each in (model, twin)
        ]
        model(torch.ones(2, 70)).sum().backward()
        containers[0].step()
        containers[0].load_state_dict(containers[0].state_dict())
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        dcp.save({"optimizer": containers[0], "model": model}, checkpoint_id=folder[0])
        dcp.load({"optimizer": containers[1], "model": twin}, checkpoint_id=folder[0])
        for each, container in zip((model, twin), containers, strict=True):
            container.zero_grad()
            each(torch.ones(2, 70)).sum().backward()
            container.step()
        assert furthest(model, twin) == 0
        wrong = containers[0].state_dict()
        if dist.get_rank() == 1:
            wrong |= {key: None for key in wrong if key.endswith(".lr")}
        with pytest.raises(ValueError, match=r"\.lr' is None, expected a value like"):
            containers[0].load_state_dict(wrong)


def parameters_made_in_inference_mode() -> None:
    for partition in BUCKETS:
        with torch.inference_mode():
            model = layers(4)
        for param in model.parameters():
            param.data = param.detach().clone()
        twin = layers(4)
        for each, optimizer in (
            (model, ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, partition=partition)),
            (twin, FusedAdamW(twin.parameters())),
        ):
            for _ in range(2):
                for param in each.parameters():
                    param.grad = torch.ones_like(param)
                optimizer.step()
        assert furthest(model, twin) == 0


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        failed_backward,
        reentrant_and_tied,
        without_zero_grad,
        other_layout,
        copied_with_scheduler,
        closure_replaces_memory,
        clipped_copies,
        foreign_state,
        torchs_hook_in_a_subgroup,
        without_a_group,
        second_optimizer,
        load_refused_on_one_rank,
        group_refused,
        gathers_two_buckets,
        masters_from_fp32,
        written_weights,
        codes_of_other_layouts,
        by_another_callable,
        complex_gradients_are_clipped,
        unequal_arguments,
        trainers_container_loads_its_shards,
        parameters_made_in_inference_mode,
    )
}

if __name__ == "__main__":
    run_cases(lambda: CASES)
