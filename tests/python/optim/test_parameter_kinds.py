"""Accepted parameters and gradients: frozen, complex, wrapped, of inference mode, 16-bit."""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from torchopt_ext import FusedAdamW, digest
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.mixed_precision import FSDPadaptOptimizer
from torchopt_ext.optim import param_states as state
from torchopt_ext.zero import ZeroRedundancyOptimizer

from ...support.compare import assert_same, assert_same_bits, bits, snapshot
from ...support.problems import copy_params, make_params, set_gradients, train
from ...support.ways import OURS, TORCH, each_class
from .subject import assert_close_to_torch

# ---- frozen parameters ---------------------------------------------------------------------------

FROZEN: dict[str, Callable[[], Tensor]] = {
    "uint8": lambda: torch.arange(6, dtype=torch.uint8),
    "int8": lambda: torch.arange(6, dtype=torch.int8),
    "float8": lambda: torch.ones(6).to(torch.float8_e4m3fn),
    "complex32": lambda: torch.ones(6, dtype=torch.complex32),
    "meta": lambda: torch.ones(6, device="meta"),
    "subclass": lambda: TwoTensor(torch.ones(6), torch.ones(6)),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_frozen_parameters_of_any_kind(kind: str) -> None:
    """A frozen first parameter of any kind does not disturb steps, state dicts and other loops."""
    frozen = nn.Parameter(FROZEN[kind](), requires_grad=False)
    params, reference = make_params(), make_params()
    optimizer, alone = FusedAdamW([frozen, *params], track=True), FusedAdamW(reference, track=True)
    optimizer.init_state()
    for seeds in ((0, 1), (2, 3)):
        train(optimizer, seeds, params)
        train(alone, seeds)
        optimizer.refresh_masters()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert digest(optimizer).sum() != digest(alone).sum()  # other parameter numbers
    assert_same_bits(params, reference)
    assert frozen not in optimizer.state
    assert set(optimizer.state_dict()["state"]) == {1, 2, 3, 4}
    assert optimizer.control.skipped_steps == 0


@pytest.mark.parametrize("kind", FROZEN)
@pytest.mark.parametrize("base", [FusedAdamW, torch.optim.AdamW])
def test_frozen_parameters_of_any_kind_under_wrappers(kind: str, base: Any) -> None:
    model = nn.Module()
    model.frozen = nn.Parameter(FROZEN[kind](), requires_grad=False)
    model.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    wrappers: list[Any] = [FSDPadaptOptimizer(base(model.parameters(), lr=0.1))]
    if base is FusedAdamW:
        wrappers.append(OptimizersContainer([model], base, {"lr": 0.1}))
    for optimizer in wrappers:
        model.weight.data.fill_(1.0)
        for _ in range(2):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert model.weight[0] < 0.9


# ---- complex parameters --------------------------------------------------------------------------

COMPLEX_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "amsgrad": True, "maximize": True},
    {"max_grad_norm": 0.5, "skip_nonfinite": True},
]


def complex_params(dtype: torch.dtype) -> list[nn.Parameter]:
    """Returns long and short rows, a scalar, a transposed matrix, and a column with gaps."""
    params = make_params([(2, 3000), (7,), (), (5, 40), (3, 4), (6, 2)], dtype)
    views = [params[4].detach().t(), params[5].detach()[:, 0]]
    return [*params[:4], *map(nn.Parameter, views)]


@each_class
@pytest.mark.parametrize("options", COMPLEX_OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """A step has the bits of a step over real and imaginary parts, and torch's values and state."""
    mine = complex_params(dtype)
    parts = [nn.Parameter(torch.view_as_real(p.detach()).clone()) for p in mine]
    theirs = copy_params(mine)
    ours, real = OURS[name](mine, **options, track=True), OURS[name](parts, **options, track=True)
    kept = {k: v for k, v in options.items() if k not in ("max_grad_norm", "skip_nonfinite")}
    reference = TORCH[name](theirs, **kept)
    for step in range(4):
        set_gradients(mine, seed=step)
        for p, part, other in zip(mine, parts, theirs, strict=True):
            part.grad, other.grad = torch.view_as_real(p.grad), p.grad.clone()
        if "max_grad_norm" in options:
            nn.utils.clip_grad_norm_(theirs, options["max_grad_norm"])
        ours.step()
        real.step()
        reference.step()
        if step == 1:  # exchange the state with torch
            reference.load_state_dict(copy.deepcopy(ours.state_dict()))
            reference.param_groups[0]["fused"] = None  # torch's CPU kernel does not support complex
            ours.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert_same_bits([torch.view_as_real(p.detach()) for p in mine], parts)
    assert bits(ours.control.grad_norm) == bits(real.control.grad_norm)
    assert digest(ours).equal(digest(real))
    assert ours.telemetry.grad_norms.equal(real.telemetry.grad_norms)
    for p, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, other, rtol=3e-6, atol=1e-6)
        for key, value in reference.state[other].items():
            assert ours.state[p][key].dtype == value.dtype
            torch.testing.assert_close(ours.state[p][key], value, rtol=3e-6, atol=1e-6)


def test_lazy_conjugates_are_resolved() -> None:
    params, reference = (make_params([(5,)], torch.complex64) for _ in range(2))
    for ps in (params, reference):
        set_gradients(ps)
    params[0].grad = params[0].grad.conj()
    reference[0].grad = reference[0].grad.conj().resolve_conj()
    for ps in (params, reference):
        FusedAdamW(ps).step()
    assert_same_bits(params, reference)


OWN_MOMENTS = "their moments have their dtype"


@pytest.mark.parametrize(
    ("dtype", "options", "reason"),
    [
        (torch.complex64, {"state_dtype": torch.bfloat16}, OWN_MOMENTS),
        (torch.complex64, {"state_dtype": "int8"}, OWN_MOMENTS),
        (torch.float64, {"state_dtype": torch.bfloat16}, OWN_MOMENTS),
        (torch.float16, {"master_weights": "remainder"}, "a remainder completes bfloat16 only"),
        (torch.float16, {"master_weights": "remainder8"}, "a remainder completes bfloat16 only"),
        (torch.float16, {"stochastic_rounding": True}, "they are rounded to nearest"),
    ],
    ids=str,
)
def test_options_apply_where_they_can(
    dtype: torch.dtype, options: dict[str, Any], reason: str
) -> None:
    """One weight that cannot have an option takes it from no other."""
    torch.manual_seed(0)
    first = torch.bfloat16 if dtype == torch.float16 else torch.float32
    weights = [nn.Parameter(torch.randn(4, 64, dtype=d)) for d in (first, dtype)]
    alone = [nn.Parameter(weight.detach().clone()) for weight in weights]
    kind = str(dtype).removeprefix("torch.")
    message = f"{next(iter(options))} does not apply to parameters of {kind}: {reason}"
    with pytest.warns(UserWarning, match=message):
        optimizer = FusedAdamW(weights, **options)
    assert message in repr(optimizer)
    twins = [FusedAdamW(alone[:1], **options), FusedAdamW(alone[1:])]
    for one in (optimizer, *twins):
        for param in (p for group in one.param_groups for p in group["params"]):
            param.grad = torch.ones_like(param) * 0.5
        one.step()
    for weight, other, twin in zip(weights, alone, twins, strict=True):
        assert torch.equal(weight, other)
        assert optimizer.state[weight].keys() == twin.state[other].keys()
    held = {name: value for name, value in options.items() if name != "stochastic_rounding"}
    moments = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    assert sum(t.nbytes for t in moments) == sum(
        rank.masters + rank.moments for rank in FusedAdamW.estimate(weights, **held)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        late = FusedAdamW(weights[:1], **options)
        with pytest.raises(UserWarning, match=kind):
            late.add_param_group({"params": weights[1:]})
    assert len(late.param_groups) == 1


# ---- gradients of 16 bits ------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 0.5, "amsgrad": True}, {"track": True}, {"state_dtype": torch.bfloat16}],
    ids=str,
)
def test_gradients_of_16_bits(gradient: torch.dtype, options: dict[str, Any]) -> None:
    """A step with 16-bit gradients has the bits of a step with the same values in float32."""
    shapes = ((3, 5000), (7,), (40, 70))
    mine, reference = make_params(shapes), make_params(shapes)
    optimizers = [FusedAdamW(params, **options) for params in (mine, reference)]
    for step in range(3):
        set_gradients(reference, seed=step)
        for p, q in zip(mine, reference, strict=True):
            rounded = q.grad.to(gradient)
            q.grad, p.grad_dtype = rounded.float(), gradient
            p.grad = rounded if step < 2 else None
            if step == 2:  # the dtype may change between steps
                p.grad_dtype, p.grad = None, rounded.float()
        for optimizer in optimizers:
            optimizer.step()
    assert snapshot(optimizers[0]) == snapshot(optimizers[1])
    assert bits(optimizers[0].control.grad_norm) == bits(optimizers[1].control.grad_norm)
    if "track" in options:
        assert_same(vars(optimizers[0].telemetry), vars(optimizers[1].telemetry))


def test_gradients_of_16_bits_from_autograd() -> None:
    """The example of docs/step.md works with write-back; float64 parameters need float64."""
    wide, double = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = FusedAdamW([wide, double], max_grad_norm=1.0, write_back_gradients=True)
    wide.grad_dtype = torch.bfloat16
    (wide.sum() * 2).backward()
    optimizer.step()
    assert wide.grad is not None
    assert wide.grad.dtype == torch.bfloat16
    torch.testing.assert_close(wide.grad.float().norm(), torch.tensor(1.0), rtol=1e-2, atol=0)
    double.grad_dtype = None
    for dtype in (torch.float32, torch.bfloat16):
        double.grad = torch.ones(3, dtype=dtype)
        with pytest.raises(RuntimeError, match=r"gradient 1.*expected float64"):
            optimizer.step()


# ---- wrapper subclasses --------------------------------------------------------------------------


class Wrapped(Tensor):
    """A weight as in torchao's float8 and int8 training: its memory is that of an inner tensor.

    ``scale`` stands for a value computed once per step for all weights. Operators return plain
    tensors, except the operators with which FSDP2 makes shards.
    """

    KEPT = ("empty_like", "new_zeros", "slice", "view", "as_strided", "_to_copy", "split", "clone")

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor | None = None) -> Wrapped:
        wrapper: Wrapped = Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype
        )
        return wrapper

    def __init__(self, data: Tensor, scale: Tensor | None = None) -> None:
        self._data, self._scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_data"] + ["_scale"] * (self._scale is not None), None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Wrapped:
        return cls(inner["_data"], inner.get("_scale"))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "detach":
            return cls(args[0]._data, args[0]._scale)
        plain = pytree.tree_map_only(cls, lambda t: t._data, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if name == "copy_":
            return args[0]
        if name in cls.KEPT:
            return pytree.tree_map_only(Tensor, cls, result)
        return result

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._data,), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is None:
            return gathered[0], gathered
        return None  # the same memory


def linear_model(wrapped: bool, sharded: bool, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)).to(dtype)
    for layer in model:
        data = layer.weight.detach()
        layer.weight = nn.Parameter(Wrapped(data, torch.ones(())) if wrapped else data)
    if sharded:
        fully_shard(model).set_force_sum_reduction_for_comms(True)
    return model


def plain(tensor: Any) -> Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    inner: Tensor = local._data if isinstance(local, Wrapped) else local
    return inner.detach()


def test_finalizers_run_on_the_thread_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that only the step refers to is freed with the step, not by a pass's thread."""
    freed_by: set[int] = set()

    def new_gradients(params: list[Any], **_: Any) -> list[Tensor]:
        copies = [plain(param.grad).clone() for param in params]
        for gradient in copies:
            weakref.finalize(gradient, lambda: freed_by.add(threading.get_ident()))
        return copies

    monkeypatch.setattr(state, "local_gradients", new_gradients)
    torch.set_num_threads(2)
    params = [nn.Parameter(Wrapped(torch.zeros(2))) for _ in range(1100)]
    optimizer = FusedAdamW(params)
    for param in params:
        param.grad = Wrapped(torch.ones(2))
    optimizer.step()
    assert freed_by == {threading.get_ident()}


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp"])
@pytest.mark.parametrize("held", ["fp32", "master", "torch under FSDPadaptOptimizer"])
def test_wrapper_subclasses(held: str, sharded: bool, one_rank: None) -> None:
    """A step has the bits of a step on the same weights without the subclass."""
    dtype = torch.float32 if held == "fp32" else torch.bfloat16
    models = [linear_model(wrapped, sharded, dtype) for wrapped in (False, True)]
    optimizers: list[Any] = []
    for model in models:
        if held.startswith("torch"):
            base: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
            optimizers.append(FSDPadaptOptimizer(base))
        else:
            kwargs: Any = {"master_weights": "fp32"} if held == "master" else {}
            named = model.named_parameters()
            optimizers.append(FusedAdamW(named, lr=0.1, max_grad_norm=1.0, **kwargs))
    for step in range(4):
        if step == 2:  # round trip through a state dict
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        generator = torch.Generator().manual_seed(step)
        for pair in zip(*(model.parameters() for model in models), strict=True):
            gradient = torch.randn(pair[0].shape, generator=generator).to(dtype)
            for p in pair:
                placed: Any = type(plain(p))(gradient)
                if sharded:
                    placed = dist.tensor.DTensor.from_local(placed, p.device_mesh, p.placements)
                p.grad = placed
        for optimizer in optimizers:
            optimizer.step()
    params = [[plain(p) for p in model.parameters()] for model in models]
    assert_same_bits(*params)
    assert not torch.equal(params[0][0], plain(linear_model(False, False, dtype)[0].weight))
    for model, optimizer in zip(models, optimizers, strict=True):
        if held == "fp32":
            reference = torch.optim.AdamW(model.parameters())
            reference.load_state_dict(optimizer.state_dict())
            types = {type(v) for s in reference.state.values() for v in s.values()}
            assert Wrapped not in types


def test_wrapper_subclasses_under_fsdp_train(one_rank: None) -> None:
    """Training through FSDP2's all-gather of the subclass matches torch's AdamW."""
    data = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    runs = []
    for make in (FusedAdamW, torch.optim.AdamW):
        model = linear_model(True, True, torch.float32)
        optimizer = make(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        runs.append([plain(p) for p in model.parameters()])
        types = {type(plain(v)) for s in optimizer.state.values() for v in s.values()}
        assert types == {Tensor}
    assert_close_to_torch(*runs)
    assert bits(runs[0][0]) != bits(plain(linear_model(True, False, torch.float32)[0].weight))


# ---- made in inference mode, and Partial ---------------------------------------------------------


def made_in_inference_mode(start: Tensor) -> nn.Parameter:
    """Returns a parameter without a version counter, which is no inference tensor any more."""
    with torch.inference_mode():
        param = nn.Parameter(torch.empty_like(start))
    param.data = torch.empty_strided(start.size(), start.stride(), dtype=start.dtype)
    param.data.copy_(start)
    assert not param.is_inference()
    return param


STEPS_OF_ONE: dict[str, Callable[[nn.Parameter], Any]] = {
    "fused": lambda p: FusedAdamW([p], max_grad_norm=1.0, write_back_gradients=True),
    "masters": lambda p: FusedAdamW([p], master_weights="fp32"),
    "over torch's": lambda p: FSDPadaptOptimizer(torch.optim.AdamW([p])),
    "in backward": lambda p: OptimizersInBackwardContainer([nn.ParameterList([p])], FusedAdamW, {}),
    "balanced": lambda p: ZeroRedundancyOptimizer([p], FusedAdamW, partition="balanced"),
    "whole": lambda p: ZeroRedundancyOptimizer([p], FusedAdamW, parameters_as_bucket_view=True),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", STEPS_OF_ONE)
@pytest.mark.parametrize("dense", [True, False])
def test_parameters_made_in_inference_mode(kind: str, dense: bool) -> None:
    dtype = torch.bfloat16 if kind in ("masters", "over torch's") else torch.float32
    start = torch.ones(8, 8, dtype=dtype)
    if not dense and kind in ("fused", "masters"):
        start = torch.ones(8, 16, dtype=dtype)[:, :8]
    param, reference = made_in_inference_mode(start), nn.Parameter(start.clone())
    for p in (param, reference):
        optimizer = STEPS_OF_ONE[kind](p)
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert torch.equal(param, reference) and not torch.equal(param, start)


def test_a_parameter_whose_value_no_rank_has_is_rejected(one_rank: None) -> None:
    """A frozen one is not: a step leaves it as it is."""
    mesh = init_device_mesh("cpu", (1,))
    partial = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    plain = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match=r"parameter 1 .* has placements \(Partial\(sum\),\)"):
        FusedAdamW([plain, partial])
    partial.requires_grad_(False)
    optimizer = FusedAdamW([plain, partial], max_grad_norm=1.0)
    for _ in range(2):
        plain.grad = torch.ones(3)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())  # the next step builds a plan
    assert float(optimizer.control.grad_norm) == pytest.approx(3**0.5)
