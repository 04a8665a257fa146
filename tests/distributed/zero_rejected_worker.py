"""Cases of test_workers.py: what ZeRO rejects raises on all ranks and changes nothing.

Where only one rank has the fault, the others raise an error that names it. Steps that a rank
rejects are in step_rejection_worker.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from zero_common import (
    KINDS,
    PARTITIONS,
    SHARDED,
    Cases,
    groups_of,
    layers,
    own_group,
    parameters,
    plain_over,
    raises,
    whole_state,
    zero_over,
)

from tests.support.compare import assert_same, unchanged
from tests.support.problems import params_of, set_gradients, train
from tests.support.ranks import gathered, run_cases
from torchopt_ext import FusedAdamW, FusedMuon
from torchopt_ext.trainer.zero_container import ZeroOptimizersContainer
from torchopt_ext.zero import ZeroRedundancyOptimizer, hook_with_zero_step, reduce_scatter_hook
from torchopt_ext.zero.local_optimizer import LocalOptimizer

BF16 = torch.bfloat16
LAST = 1
BALANCED = PARTITIONS["balanced"]


def is_last() -> bool:
    return dist.get_rank() == LAST


def trained(kind: str = "FusedAdamW", **options: Any) -> Any:
    zero = zero_over(groups_of(parameters()), kind, **options)
    train(zero, range(2))
    return zero


def rejected(zero: Any, call: Callable[[], Any], error: Any, *parts: str) -> None:
    """Asserts that the call raises on all ranks and changes nothing; then the optimizer steps."""
    with unchanged(zero), raises(error, *parts):
        call()
    train(zero, [9])


# ---- loading -------------------------------------------------------------------------------------


def damage(saved: Any, how: str) -> tuple[str, ...]:
    """Spoils a state dict. Returns what the error says."""
    kind, _, number = how.partition(" ")
    groups = saved["param_groups"]
    if kind == "shape":
        entry = saved["state"][int(number)]
        name = next(name for name in entry if name != "step")
        entry[name] = torch.ones(2, *entry[name].shape)
        return f"parameter {number}", "(2, "
    if kind == "missing":
        entry = saved["state"][int(number)]
        del entry[[*entry][-1]]
        return ("exp_avg_sq",)
    if kind == "sizes":
        groups[1]["params"].insert(0, groups[0]["params"].pop())
    elif kind == "fewer":
        groups.pop()
    else:
        groups.append({**groups[1], "params": [99]})
    return ("group",)


def load(kind: str, how: str, everywhere: bool = True, **options: Any) -> None:
    plain = plain_over(groups_of(parameters()), kind)
    train(plain, range(3))
    saved = copy.deepcopy(plain.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    says = damage(copy.deepcopy(saved), how)
    if everywhere or is_last():
        damage(saved, how)
    zero = trained(kind, **options)
    rejected(zero, lambda: zero.load_state_dict(saved), (KeyError, ValueError), *says)


def load_fails_late(kind: str, fault: str, **options: Any) -> None:
    """The last rank fails at the end of a load, or in a hook after it."""
    zero = trained(kind, **options)
    if kind.startswith("Fused"):
        zero.optim.set_schedule(warmup_steps=2, stable_steps=2, decay_steps=2)
    train(zero, range(3))
    saved = whole_state(zero)
    saved["param_groups"][0]["lr"] = 0.5
    train(zero, range(2))
    fails = mock.Mock(side_effect=MemoryError("short of memory") if is_last() else None)
    at_end = mock.patch.object(LocalOptimizer, "sync", fails) if fault == "end" else nullcontext()
    if fault == "hook":
        zero.register_load_state_dict_post_hook(fails)
    with unchanged(zero), raises((MemoryError, ValueError), "short of memory"), at_end:
        zero.load_state_dict(saved)
    fails.side_effect = None
    zero.load_state_dict(saved)
    assert zero.param_groups[0]["lr"] == 0.5


def load_by_torchs_function(kind: str, **options: Any) -> None:
    """torch's functions move what each rank has, nested, and with the greedy partition flat. They
    reject a dict without state of a parameter that a rank steps."""
    source, target = layers(3), layers(3)
    zero, loaded = (zero_over(m.parameters(), kind, **options) for m in (source, target))
    train(zero, range(2))
    train(loaded, range(1))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    nested = StateDictOptions(strict=False)
    for optimizer in (zero, loaded):
        optimizer.zero_grad()
    saved, of_flat = (get_optimizer_state_dict(source, zero, options=o) for o in (nested, flat))
    less = {**saved, "state": dict([*saved["state"].items()][1:])}
    for state, form in ((less, nested), (of_flat, flat), (saved, nested)):
        call = partial(set_optimizer_state_dict, target, loaded, state, options=form)
        if state is less or (form is flat and "partition" in options):
            with unchanged(loaded), raises(ValueError, "is missing", "strict=False"):
                call()
        else:
            call()
            assert_same(loaded.optim.state_dict()["state"], zero.optim.state_dict()["state"])
            train(loaded, range(3))
            loaded.zero_grad()


def load_into_a_container() -> None:
    model = layers(4)
    container = ZeroOptimizersContainer([model], FusedAdamW, {"lr": 0.1}, partition="balanced")
    train(container.optimizers[0], range(1))
    wrong = container.state_dict()
    if is_last():
        wrong |= {key: None for key in wrong if key.endswith(".lr")}
    with unchanged(container), raises(ValueError, ".lr' is None, expected a value like"):
        container.load_state_dict(wrong)


# ---- building, and adding groups -----------------------------------------------------------------

ODDITIES = {  # of the last rank's parameters, and what the message names
    "order": "'two'",
    "names": "'two'",
    "shape": "'two'",
    "dtype": "'one'",
    "count": "'three'",
    "frozen": "'two'",
    "mixed dtypes": "bfloat16",
    "none": "empty",
}


def oddly(how: str, params: list[Any], names: list[str]) -> None:
    if how == "order":
        params[1], params[2] = params[2], params[1]
    elif how == "names":
        names[1], names[2] = names[2], names[1]
    elif how == "shape":
        params[1] = nn.Parameter(torch.ones(2, 2))
    elif how == "dtype":
        params[:] = [nn.Parameter(p.detach().to(BF16)) for p in params]
    elif how == "count":
        del params[2]
    elif how == "frozen":
        params[1].requires_grad_(False)
    elif how == "mixed dtypes":
        params[1] = nn.Parameter(params[1].detach().to(BF16))
    else:
        params.clear()


def other_parameters(how: str, message: str) -> None:
    """Builds an optimizer, or adds a group, while the last rank has other parameters."""
    params, names = parameters([(2, 3), (4,), (5,)]), ["one", "two", "three"]
    if is_last():
        oddly(how, params, names)
    with raises(ValueError, message):
        zero_over(zip(names, params, strict=False), "AdamW")
    if how in ("names", "none"):
        return  # no parameters are a group, and a group without names has no others
    with raises(ValueError, "(2, 2)" if how == "shape" else ""):
        zero_over(params, "AdamW")
    zero = zero_over(parameters([(1,)]), "AdamW")
    rejected(zero, partial(zero.add_param_group, {"params": params}), ValueError)


def other_arguments() -> None:
    """The last rank passes another value of an argument that all ranks must share."""
    for name, common, other in (
        ("partition", "greedy", "balanced"),
        ("bucket_elements", 64, 128),
        ("max_grad_norm", 1.0, None),
        ("optimizer_class", FusedAdamW, torch.optim.AdamW),
        ("parameters_as_bucket_view", False, True),
        ("overlap_with_ddp", False, True),
        ("params_per_rank", [0, 1], [1, 0]),
        ("lr", 0.1, 0.2),
        ("state_dtype", None, BF16),
        ("weight_decay", 0.1, 0.2),
    ):
        params: list[Any] = [*layers(1).parameters()]
        options: dict[str, Any] = {"optimizer_class": FusedAdamW, "lr": 0.1}
        options[name] = other if is_last() else common
        if name == "bucket_elements":
            options["partition"] = "balanced"
        elif name == "weight_decay":  # of a group
            params = [{"params": params, name: options.pop(name)}]
        elif name == "params_per_rank":
            options[name] = [[params[i]] for i in options[name]]
        with raises(ValueError, "the ranks differ in their parameters and arguments", f"{name}="):
            ZeroRedundancyOptimizer(params, **options)
    with raises(ValueError, "differ in their arguments"):
        trained().consolidate_state_dict(to=99 * is_last())


def wrong_owners() -> None:
    params = parameters()
    per_rank = [params[:3], params[3:]]
    stranger = [params[:3], [nn.Parameter(torch.ones(3))]]
    build = partial(zero_over, params, params_per_rank=per_rank)
    for wrong, part in ((per_rank[:1], "world size"), (stranger, "not passed"),
                        ([params, params], "twice")):  # fmt: skip
        with raises(ValueError, part):
            build(params_per_rank=wrong)
    with raises(RuntimeError, "single parameter group"):
        zero_over(groups_of(params), params_per_rank=per_rank)
    with raises(ValueError, "params_per_rank"):
        build(partition="balanced")


def groups_that_do_not_fit(**options: Any) -> None:
    """A group of another dtype, one that the local optimizer rejects, and tied parameters."""
    more = [nn.Parameter(torch.ones(70, dtype=BF16))]
    zero = trained(**options)
    tied = nn.Parameter(params_of(zero)[2].data)
    for group, error, parts in (
        ({"params": more}, ValueError, ("bfloat16", "float32")),
        ({"params": params_of(zero)[:1]}, ValueError, ("more than one parameter group",)),
        ({"params": [tied]}, ValueError, ("share memory",)),
        ({"params": parameters([(3,)]), "bias_correction": "no"}, TypeError, ("bias_correction",)),
    ):
        rejected(zero, partial(zero.add_param_group, group), error, *parts)
    if options.get("partition") == "balanced":
        across = [torch.ones(70, 64).t().requires_grad_()]
        matrix = {"params": across, "algorithm": "muon"}
        rejected(zero, partial(zero.add_param_group, matrix), ValueError, "contiguous parameters")


def tied_later(kind: str, **options: Any) -> None:
    """Parameters come to share memory after the optimizer was built."""
    zero = zero_over(parameters([(70, 3)] * 4), kind, **options)
    train(zero, range(2))
    params = params_of(zero)
    memory, params[1].data = params[1].data, params[0].data
    set_gradients(params)
    says = "parameter 0 of shape (70, 3) and parameter 1 of shape", "share memory"
    with unchanged(zero), raises(RuntimeError, *says):
        zero.step()
    with raises(ValueError, "share memory"):
        zero_over(params, kind, **options)
    params[1].data = memory
    train(zero, [9])


def other_shape() -> None:
    zero = zero_over([("conv", p) for p in parameters([(8, 4, 3, 3)])], partition="balanced")
    train(zero, range(2))
    (weight,) = params_of(zero)
    weight.data = torch.zeros(9, 4, 3, 3)
    weight.grad = torch.ones(9, 4, 3, 3)
    with raises(RuntimeError, "'conv' of shape (9, 4, 3, 3), ", "had shape (8, 4, 3, 3)"):
        zero.step()


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels_last": lambda data: data.to(memory_format=torch.channels_last),
    "transposed": lambda data: data.transpose(0, 1),  # the same memory
    "other shape": lambda data: data.view(128, 128),
}


def other_layout(change: str, mode: str, everywhere: bool) -> None:
    """A cut parameter's memory is replaced once the optimizer is built, and DDP is made anew."""
    torch.manual_seed(0)
    models = [nn.Conv2d(64, 64, 2)]
    models.append(copy.deepcopy(models[0]))
    zero = zero_over(models[0].parameters(), **(SHARDED if mode == "sharded" else BALANCED))
    plain = plain_over(models[1].parameters())

    def backward() -> None:
        ddp: nn.Module = Squares(models[0])
        if mode != "sharded":
            ddp = DDP(ddp, find_unused_parameters=True)  # does not learn that strides have changed
            if mode == "hook":
                ddp.register_comm_hook(None, reduce_scatter_hook(zero))
        ddp().backward()

    def both() -> None:
        for _ in range(2):
            backward()
            Squares(models[1])().backward()
            for optimizer in (zero, plain):
                optimizer.step()
                optimizer.zero_grad()
        for param, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(param, other)

    both()
    weight = models[0].weight
    former, weights = weight.data, [p.detach() for p in models[0].parameters()]
    if everywhere or is_last():
        weight.data = CHANGES[change](former)
    if everywhere or mode == "sharded":  # DDP compares strides
        backward()
    else:
        set_gradients(params_of(zero))
    says = "parameter 0 of shape", "shape (64, 64, 2, 2)" if change == "other shape" else "strides"
    for _ in range(2):
        with (
            unchanged(*weights),
            raises(RuntimeError, *(says if everywhere or is_last() else ["rank 1"])),
        ):
            zero.step()
    weight.data = former
    if mode != "balanced" and everywhere:  # the gradients were taken while memory had another order
        with unchanged(*weights), raises(RuntimeError, *says):
            zero.step()
    zero.zero_grad()
    both()


class Squares(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> torch.Tensor:
        weights = [
            torch.arange(float(p.numel())).view(p.shape) / p.numel() for p in self.parameters()
        ]
        return sum(
            ((p * w).square().sum() for p, w in zip(self.parameters(), weights, strict=True)),
            torch.zeros(()),
        )


# ---- hooks, groups of ranks, other optimizers ----------------------------------------------------


def hooks_that_do_not_fit() -> None:
    """torch's hooks take a global rank for a rank of the group: they raise before they step."""
    ddp = DDP(layers(1))
    with raises(ValueError, "overlap_with_ddp=True"):
        hook_with_zero_step(allreduce_hook, ddp, zero_over(ddp.parameters()))
    zero = zero_over(ddp.parameters(), overlap_with_ddp=True)
    hook_with_zero_step(allreduce_hook, ddp, zero)
    with raises(ValueError, "a hook already"):
        hook_with_zero_step(allreduce_hook, DDP(layers(1)), zero)
    groups = [dist.new_group([rank]) for rank in range(2)]
    params = [*layers(1).parameters()]
    zero = zero_over(params, process_group=groups[dist.get_rank()], overlap_with_ddp=True)
    zero._overlap_info.params_per_bucket.append(params)
    with raises(RuntimeError, "takes global ranks") if is_last() else nullcontext():
        zero._init_zero_for_overlap()


def options_of_whole_steps(name: str) -> None:
    """Options that need all gradients raise on all ranks, also once backward has built the step."""
    ddp = DDP(layers(2), bucket_cap_mb=0.01)
    zero = zero_over(ddp.parameters(), overlap_with_ddp=True)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    for _ in range(3):
        ddp(torch.ones(2, 70)).sum().backward()
    assert gathered(bool(zero.state)) == [True, True]
    for of_zero in ("max_grad_norm", "skip_nonfinite", "control"):
        for access in (partial(getattr, zero, of_zero), partial(setattr, zero, of_zero, 1.0)):
            with raises(AttributeError, f"overlap_with_ddp=True has no {of_zero}"):
                access()
    if name == "has_schedule":
        zero.optim.set_schedule(warmup_steps=1, stable_steps=1, decay_steps=1)
    elif name == "has_loss_scale":
        zero.optim.set_loss_scale()
    else:
        setattr(zero.optim, name, 1.0)
    loss = ddp(torch.ones(2, 70)).sum()
    with unchanged(*ddp.parameters()), raises(RuntimeError, "bucket by bucket", name):
        loss.backward()


def without_a_group() -> None:
    """Uses an optimizer after its group was destroyed, and builds one on a rank outside."""
    group, first = dist.new_group(), dist.new_group([0])
    zero = zero_over(parameters(), process_group=group)
    plain = FusedAdamW(parameters(), process_group=group, max_grad_norm=1.0)
    for optimizer in (zero, plain):
        train(optimizer, [0])
    dist.destroy_process_group(group)
    for call in (zero.step, zero.consolidate_state_dict, plain.step):
        with unchanged(zero, plain), raises(RuntimeError, "the process group was destroyed"):
            call()
    with raises(RuntimeError, "the process group was destroyed"):
        zero_over(parameters(), process_group=group)
    with raises(TypeError, "params is a Linear module, expected parameters or param groups"):
        zero_over(nn.Linear(2, 2))
    for wrong, meant in (("shard_gradients", "sharded_gradients"), ("group", "process_group")):
        with raises(TypeError, f"nor FusedAdamW has an argument '{wrong}'; did you mean '{meant}'"):
            zero_over(parameters(), **{wrong: None})
    with raises(TypeError, "did you mean 'max_grad_norm'"):
        zero_over(parameters(), clip_grad_norm=1.0)
    with raises((TypeError, ValueError), "rank 1 is not in") if is_last() else nullcontext():
        zero_over(parameters(), process_group=first)
    with raises(TypeError, "has this rank") if is_last() else nullcontext():
        FusedAdamW(parameters(), process_group=first)


def second_optimizer() -> None:
    """A rejected optimizer leaves no hooks. A second optimizer of the same parameters raises."""
    model, data = layers(4), torch.ones(2, 70)
    with raises(ValueError, "learning rate"):
        zero_over(model.parameters(), lr=-1.0, **SHARDED)
    model(data).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    optimizers = [zero_over(model.named_parameters(), **SHARDED) for _ in range(2)]
    with raises(RuntimeError, "has taken the gradient of parameter '3"):
        model(data).sum().backward()
    del optimizers


def without_zero_grad() -> None:
    """The model's does not reach sharded gradients: backward raises after a step, else adds up."""
    model, data = layers(4), torch.ones(2, 70)
    zero = zero_over(model.parameters(), **SHARDED)
    norms = []
    for passes in (1, 2):
        for _ in range(passes):
            model.zero_grad()
            model(data).sum().backward()
        norms.append(float(zero.clip_grad_norm_(1e9)))
        zero.zero_grad()
    assert norms[1] == 2 * norms[0] > 0
    model(data).sum().backward()
    zero.step()
    model.zero_grad()
    with raises(RuntimeError, "call the optimizer's zero_grad()"):
        model(data).sum().backward()
    zero.zero_grad()
    model(data).sum().backward()
    zero.step()


def wrong_local_optimizers() -> None:
    """Options of fused optimizers on another one, and 8-bit moments that ZeRO does not know of."""
    zero = trained("AdamW")
    with raises(AttributeError, "a AdamW, expected a FusedOptimizer"):
        zero.max_grad_norm = 1.0
    make = partial(FusedAdamW, state_dtype="int8")
    with raises(ValueError, "give state_dtype to ZeroRedundancyOptimizer"):
        ZeroRedundancyOptimizer(layers(4).parameters(), lambda params, **options: make(params))
    for sharded in (False, True):  # each rank would have half of the rows
        with raises(ValueError, "is of Muon, but partition='balanced'", "by the optimizer's class"):
            ZeroRedundancyOptimizer(
                parameters([(64, 70)]), lambda params: FusedMuon(params), partition="balanced",
                elementwise=True, sharded_gradients=sharded,
            )  # fmt: skip
    with raises(ValueError, "needs contiguous parameters"):
        across = torch.ones(70, 64).t().requires_grad_()
        ZeroRedundancyOptimizer([across], FusedMuon, partition="balanced")
    weights = layers(2).to(BF16)
    zero = zero_over(weights.named_parameters(), master_weights="fp32")
    some = {"0.weight": torch.ones(70, 70)}
    rejected(zero, partial(zero.refresh_masters, some), ValueError, "is missing")


def cases() -> Cases:
    table: Cases = {
        function.__name__: function
        for function in (
            load_into_a_container, other_arguments, wrong_owners, other_shape,
            hooks_that_do_not_fit, without_a_group, second_optimizer, without_zero_grad,
            wrong_local_optimizers,
        )
    }  # fmt: skip
    table |= {
        f"{change}, {mode}{'' if everywhere else ' on one rank'}": partial(
            other_layout, change, mode, everywhere
        )
        for change in CHANGES
        for mode in ("balanced", "hook", "sharded")
        for everywhere in (True, False)
    }
    hows = ["shape 0", "shape 1", "shape 3", "shape 5", "sizes", "fewer", "more"]
    for kind in KINDS:
        missing = [f"missing {number}" for number in range(6)] if kind != "SGD" else []
        for how in hows + missing:
            table[f"load {kind}, {how}"] = partial(load, kind, how)
        for how in ("shape 3", *missing[:2]):
            table[f"load {kind}, {how} on one rank"] = partial(load, kind, how, everywhere=False)
        table[f"load {kind}, balanced"] = partial(load, kind, "shape 3", **PARTITIONS["balanced"])
        for fault in ("end", "hook"):
            table[f"load {kind} fails late, {fault}"] = partial(load_fails_late, kind, fault)
        for name, options in PARTITIONS.items():
            table[f"tied {kind}, {name}"] = partial(tied_later, kind, **options)
            if kind != "SGD":
                case = partial(load_by_torchs_function, kind, **options)
                table[f"torch's function, {kind}, {name}"] = case
    table |= {f"other {how}": partial(other_parameters, how, m) for how, m in ODDITIES.items()}
    for name in ("max_grad_norm", "skip_nonfinite", "has_schedule", "has_loss_scale"):
        table[f"overlap, then {name}"] = partial(options_of_whole_steps, name)
    for name, options in PARTITIONS.items():
        table[f"groups, {name}"] = partial(groups_that_do_not_fit, **options)
    return table


if __name__ == "__main__":
    run_cases(cases, own_group)
