"""What a step reports to others: version counters for autograd, hooks and profilers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW, GradScaler
from torchopt_ext._torch import compiled_autograd
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.containers.deferred_clipping import defer_clipping

from ...support.compare import unchanged
from ...support.problems import make_params, set_gradients, train

MANY = [(2,)] * 1500  # enough for several threads


def stepped(shapes: Any = MANY, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    params = make_params(shapes, dtype=dtype)
    optimizer = FusedAdamW(params, lr=0.02, max_grad_norm=1.0, **kwargs)
    train(optimizer, [0])
    return params, optimizer


def versions(params: list[nn.Parameter], optimizer: Any) -> list[int]:
    return [t._version for p in params for t in (p, *optimizer.state[p].values())]


def assert_steps_are_counted(params: list[nn.Parameter], optimizer: Any) -> None:
    for _ in range(2):
        before = versions(params, optimizer)
        optimizer.step()
        after = versions(params, optimizer)
        assert all(new > old for new, old in zip(after, before, strict=True))


# ---- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [MANY, [(3, 5), (300, 300), (7,)]], ids=["many", "sizes"])
@pytest.mark.parametrize("kwargs", [{}, {"amsgrad": True}, {"master_weights": "fp32"}])
def test_all_that_a_step_writes_has_another_version(shapes: Any, kwargs: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if "master_weights" in kwargs else torch.float32
    params, optimizer = stepped(shapes, dtype, **kwargs)
    assert_steps_are_counted(params, optimizer)


def test_what_a_step_does_not_write_keeps_its_version() -> None:
    params, optimizer = stepped()
    views = [nn.Parameter(part) for part in torch.zeros(8).split(2)]  # share a version
    optimizer.add_param_group({"params": views})
    train(optimizer, [1])
    for p in params[::3]:
        p.grad = None
    before = [p._version for p in params]
    optimizer.step()
    changed = [p._version != version for p, version in zip(params, before, strict=True)]
    assert changed == [p.grad is not None for p in params]
    optimizer.zero_grad()
    unwritten = versions(params + views, optimizer)
    optimizer.step()
    assert versions(params + views, optimizer) == unwritten


def test_what_shares_a_version_is_counted_once() -> None:
    shapes = [(2,)] * 300 + [(70_000,)] + [(2,)] * 300  # large moments do not share a version
    params, optimizer = stepped(shapes)
    moment = optimizer.state[params[0]]["exp_avg"]
    version = moment._version
    optimizer.step()
    assert version < moment._version <= version + 2 * torch.get_num_threads()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("how", ["entry", "swap"])
@pytest.mark.parametrize("which", [0, 700])
def test_one_that_shares_no_version_with_others(name: str, how: str, which: int) -> None:
    params, optimizer = stepped()
    entry = optimizer.state[params[which]]
    mine = entry[name].clone()
    if how == "entry":
        entry[name] = mine
    else:
        torch.utils.swap_tensors(entry[name], mine)
    if name == "step":
        optimizer.step()  # rebuilds the plan, which packs the steps again
    assert_steps_are_counted(params, optimizer)


@pytest.mark.parametrize("saved", ["param", "exp_avg"])
def test_backward_through_what_a_step_has_changed_is_refused(saved: str) -> None:
    params, optimizer = stepped([(4,), (4,)])
    factor = torch.ones(4, requires_grad=True)
    tensor = params[1] if saved == "param" else optimizer.state[params[1]][saved]
    loss = (factor * tensor).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("base", [FusedAdamW, torch.optim.SGD])
def test_allow_mutation_on_saved_tensors(base: Any) -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = FSDPadaptOptimizer(base([param], lr=0.1))
    factor = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = (factor * param).sum()
        param.grad = torch.ones_like(param)
        optimizer.step()
        loss.backward()
    assert factor.grad is not None and factor.grad.eq(1.0).all() and param.lt(1.0).all()


# ---- hooks and profilers -------------------------------------------------------------------------


def record_names(optimizer: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    return [event.name for event in profile.events() if event.name.startswith("Optimizer.step#")]


def subclass(base: Any, kind: str) -> Any:
    if kind in ("the class", "plain"):
        return base if kind == "the class" else type("Plain", (base,), {})

    def step(self: Any, closure: Any = None) -> Any:
        return base.step(self) if closure is None else base.step(self, closure)

    if kind == "mixin":
        mixin = type("Mixin", (), {"step": lambda self, closure=None: super(mixin, self).step()})
        return type("Mixed", (mixin, base), {})
    if kind == "put on the class":
        late = type("Late", (base,), {})
        late.step = step
        return late
    if kind == "wraps":  # copies torch's mark of a step that needs no patching
        step = functools.wraps(base.step)(step)
    elif kind == "decorated":
        step = torch.no_grad()(base.step)
    return type("Overriding", (base,), {"step": step})


@pytest.mark.parametrize("of", ["all optimizers", "this one"])
@pytest.mark.parametrize(
    "kind",
    ["the class", "plain", "overridden", "wraps", "decorated", "mixin", "put on the class"],
)
def test_hooks_fire_once_in_subclasses(of: str, kind: str) -> None:
    base: Any = FusedAdamW
    base(make_params())  # torch wraps a class's step when its first instance is made
    params = make_params()
    optimizer = subclass(base, kind)(params)
    calls: list[Any] = []
    if of == "this one":
        handle = optimizer.register_step_pre_hook(lambda opt, *_: calls.append(opt))
    else:
        handle = register_optimizer_step_pre_hook(lambda opt, *_: calls.append(opt))
    try:
        set_gradients(params)
        optimizer.step()
        assert calls == [optimizer]
    finally:
        handle.remove()
    optimizer.step()
    assert calls == [optimizer]
    assert optimizer.state[params[0]]["step"] == 2
    assert record_names(optimizer) == [f"Optimizer.step#{type(optimizer).__name__}.step"]


@pytest.mark.parametrize("base", [FusedAdamW, torch.optim.SGD])
def test_a_step_patched_on_an_inner_optimizer_is_called(base: Any) -> None:
    """A patched step of an inner optimizer runs, even if it takes nothing but a closure."""
    calls: list[str] = []

    def patch(optimizer: Any) -> Any:
        step = optimizer.step
        optimizer.step = lambda closure=None: calls.append("patch") or step(closure)
        return optimizer

    params = make_params()
    outer = FSDPadaptOptimizer(patch(base(params, lr=0.01)))
    set_gradients(params)
    outer.step()
    assert calls == ["patch"]
    if base is FusedAdamW:
        scaler = GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))
        optimizer = patch(base(params))
        set_gradients(params)
        scaler.step(optimizer)
        assert calls == ["patch"] * 2
        assert float(optimizer.control.grad_norm) > 0, "the scaler's context arrived"


class Mine(FusedAdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("cls", [Mine, FusedAdamW])
def test_a_joint_step_rejects_a_step_that_is_overridden_or_replaced(cls: Any) -> None:
    parts = [nn.Linear(4, 3), nn.Linear(4, 3)]
    container = OptimizersContainer(parts, cls, {"max_grad_norm": 1.0})
    if cls is FusedAdamW:
        container.optimizers[1].step = lambda: None
    set_gradients(p for part in parts for p in part.parameters())
    with pytest.raises(TypeError, match=f"{cls.__name__} overrides or replaces step"):
        container.step()
    container.optimizers[0].max_grad_norm = container.optimizers[1].max_grad_norm = None
    container.step()
    assert [len(opt.state) for opt in container.optimizers] == [2, 2 if cls is Mine else 0]


class Twice(FSDPadaptOptimizer):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


@pytest.mark.parametrize("cls", [FSDPadaptOptimizer, Twice])
@pytest.mark.parametrize("base", [FusedAdamW, torch.optim.SGD])
def test_global_hooks_fire_once_and_stay_for_other_threads(cls: Any, base: Any) -> None:
    """The inner step leaves torch's global hook tables alone, so other threads' hooks fire.

    Own hooks fire within global ones.
    """
    params, others = make_params(), make_params()
    inner = base(params, lr=0.01)
    outer, other = cls(inner), torch.optim.SGD(others, lr=0.1)
    calls: list[Any] = []

    def step_other(*_: Any) -> None:
        thread = threading.Thread(target=other.step)
        thread.start()
        thread.join()

    inner.register_step_pre_hook(step_other)
    handles = [
        outer.register_step_pre_hook(lambda *_: calls.append("own pre")),
        outer.register_step_post_hook(lambda *_: calls.append("own post")),
        register_optimizer_step_pre_hook(lambda opt, *_: calls.append(("pre", opt))),
        register_optimizer_step_post_hook(lambda opt, *_: calls.append(("post", opt))),
    ]
    try:
        set_gradients(params)
        outer.step()
    finally:
        for handle in handles:
            handle.remove()
    around = [("pre", outer), "own pre", "own post", ("post", outer)]
    assert calls == [*around[:2], ("pre", other), ("post", other), *around[2:]]
    outer.step()
    assert len(calls) == 6


def test_a_hook_that_a_closure_registers_fires() -> None:
    params = make_params()
    optimizer = FusedAdamW(params)
    calls: list[str] = []

    def closure() -> None:
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    optimizer.step(closure)
    assert calls == ["post"]


@pytest.mark.filterwarnings("error")
def test_a_compiled_step_sees_no_more_than_torch_shows_it() -> None:
    params = make_params()
    optimizer = FusedAdamW(params)
    set_gradients(params)
    torch.compile(optimizer.step, backend="eager")()
    assert optimizer.state[params[0]]["step"] == 1


WHOLE_GRAPHS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: optimizer.step,
    "code that calls step": lambda optimizer: lambda: optimizer.step(),
    "code that calls zero_grad": lambda optimizer: lambda: optimizer.zero_grad(),
}


@pytest.mark.parametrize("what", WHOLE_GRAPHS)
def test_a_whole_graph_with_an_optimizer_says_what_to_do(what: str) -> None:
    params = make_params()
    optimizer = FusedAdamW(params)
    set_gradients(params)
    compiled = torch.compile(WHOLE_GRAPHS[what](optimizer), backend="eager", fullgraph=True)
    if what == "step" and torch.__version__.startswith("2.11"):
        compiled()  # a whole graph without code was none there
        return
    name = what.split()[-1]
    with pytest.raises(Exception, match=rf"call {name}\(\) outside of the compiled function"):
        compiled()


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: FusedAdamW(model.parameters()),
    "norm": lambda model: FusedAdamW(model.parameters(), max_grad_norm=1.0),
    "container": lambda model: OptimizersContainer([model, nn.Linear(2, 2)], FusedAdamW, {}),
    "masters": lambda model: FSDPadaptOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, "") for kind in COMPILED]
    + [("plain", "hooked"), ("masters", "closure"), ("norm", "scaler"), ("container", "scaler")],
)
def test_compiled_code_calls_the_step_outside_of_its_graphs(kind: str, way: str) -> None:
    """torch.compile compiles the code before and after the step, but no frame of the step."""
    model = nn.Linear(3, 2)
    optimizer = COMPILED[kind](model)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    calls = []
    if way == "hooked":
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def training(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if way == "scaler":
            scaler.step(optimizer)
        elif way == "closure":
            optimizer.step(lambda: x.sum())
        else:
            optimizer.step()
        return y + 1

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(training, backend="eager")
    before = model.weight.detach().clone()
    for _ in range(2):
        set_gradients(list(model.parameters()))
        compiled(torch.ones(3))
        if way == "scaler":
            scaler.update()
    assert counters["frames"]["total"] == 2
    assert sum(counters["graph_break"].values()) == 1
    assert len(calls) == 2 * (way == "hooked")
    assert not torch.equal(model.weight, before)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    ("kind", "autograd"),
    [
        ("in the step", nullcontext),
        ("in backward", nullcontext),
        ("in backward", compiled_autograd),
    ],
)
def test_compiled_code_calls_backward_and_its_hooks_outside_of_its_graphs(
    kind: str, autograd: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor, "compile", lambda module, _: module)  # saves its time
    model = nn.Linear(1024, 512)
    optimizer: Any = FusedAdamW(model.parameters(), max_grad_norm=1.0)
    if kind == "in backward":
        optimizer = OptimizersInBackwardContainer([model], FusedAdamW, {})

    def training(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return optimizer.control.grad_norm

    files = []
    torch.compiler.reset()
    handle = register_bytecode_hook(lambda code, _: files.append(Path(code.co_filename)))
    before = model.weight.detach().clone()
    with autograd():
        for _ in range(2):
            torch.compile(training, backend="eager")(torch.ones(1024))
    handle.remove()
    assert Path(__file__) in files
    assert not any("torchopt_ext" in file.parts for file in files)
    assert not torch.equal(model.weight, before)


TRACED: dict[str, Callable[[nn.Module], Any]] = {
    "fused": lambda model: FusedAdamW(model.parameters()),
    "over torch's": lambda model: FSDPadaptOptimizer(torch.optim.AdamW(model.parameters())),
    "in backward": lambda model: OptimizersInBackwardContainer([model], FusedAdamW, {}),
    "clipped": lambda model: OptimizersContainer([model], FusedAdamW, {}),
    "joint": lambda model: OptimizersContainer([model], FusedAdamW, {}),
}


TRACERS: dict[str, Callable[..., Any]] = {
    "make_fx": lambda training, x: make_fx(training)(x),
    "make_fx before dispatch": lambda training, x: make_fx(training, pre_dispatch=True)(x),
    "jit": torch.jit.trace,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize(
    ("tracer", "kind"),
    [("jit", "fused"), *((tracer, kind) for tracer in list(TRACERS)[:2] for kind in TRACED)],
)
def test_a_traced_step_is_rejected(tracer: str, kind: str) -> None:
    """Its kernels are no operators, so that a replay would train nothing."""
    model = nn.Linear(4, 3)
    optimizer = TRACED[kind](model)

    def training(x: torch.Tensor) -> torch.Tensor:
        if tracer != "jit":
            model(x).sum().backward()
        if kind == "clipped":
            defer_clipping(optimizer).clip(1.0)
        optimizer.step()
        return x + 1

    example, match = torch.ones(2, 4), "cannot record the step of this optimizer"
    set_gradients(model.parameters())
    with unchanged(*model.parameters()), pytest.raises(RuntimeError, match=match):
        TRACERS[tracer](training, example)
    before = model.weight.detach().clone()
    training(example)
    assert not torch.equal(model.weight, before)
