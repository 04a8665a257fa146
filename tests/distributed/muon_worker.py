"""Cases of test_workers.py: Muon over matrices of which ranks hold parts has one process's bits."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.support.compare import assert_same_bits, snapshot
from tests.support.problems import set_gradients
from tests.support.ranks import full_tensor, gathered, run_cases
from torchopt_ext import FusedMuon, digest
from torchopt_ext.optim import fused_step
from torchopt_ext.optim.context import ALONE
from torchopt_ext.optim.step import measure_norm
from torchopt_ext.state.local import shard_of

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
GROUPS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((24, 40), {"num_heads": 4}),  # heads of 6 rows: cut inside on 3 and 4 ranks
    ((40, 24), {"num_heads": 3, "head_dim": 1, "beta2": 0.0}),  # NorMuon needs whole rows
    ((30, 16), {"split_sizes": (20, 4, 6), "adjust_lr_fn": "match_rms_adamw"}),
    ((7, 9), {"ns_coefficients": "polar_express"}),
    ((2, 9), {}),  # ranks without a part
    ((1, 12), {}),
    ((3, 8, 10), {}),  # experts
    ((8, 4, 3, 3), {"flatten": True}),
    ((16, 70), {"nesterov": False, "momentum": 0.9}),
    ((5,), {"algorithm": "adamw"}),
    ((6, 4), {"algorithm": "adamw"}),
]
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {}),
    "master": (torch.bfloat16, {"master_weights": "fp32"}),
    "remainder8, random": (
        torch.bfloat16,
        {
            "master_weights": "remainder8",
            "stochastic_rounding": True,
            "state_dtype": torch.bfloat16,
        },
    ),
}
NORMUON: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    f"NorMuon, {way}": (dtype, {**options, "beta2": 0.9}) for way, (dtype, options) in WAYS.items()
}


def layouts() -> dict[str, tuple[tuple[int, ...], list[Placement]]]:
    world = dist.get_world_size()
    found: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
        "rows": ((world,), [ROWS]),
        "columns": ((world,), [COLUMNS]),
    }
    if world == 4:
        found |= {
            "HSDP": ((2, 2), [WHOLE, ROWS]),
            "replicated inside": ((2, 2), [ROWS, WHOLE]),
            "rectangles": ((2, 2), [ROWS, COLUMNS]),
            "rows of rows": ((2, 2), [ROWS, ROWS]),
            "whole": ((2, 2), [WHOLE, WHOLE]),
        }
    return found


class Run:
    """An optimizer over whole tensors, or over DTensors with the same values and gradients."""

    def __init__(
        self,
        place: Callable[[Tensor], Tensor] = lambda t: t,
        way: str = "fp32",
        build: Callable[..., Any] = FusedMuon,
        **more: Any,
    ) -> None:
        dtype, options = {**WAYS, **NORMUON}[way]
        generator = torch.Generator().manual_seed(1)
        self.place, self.params, groups = place, [], []
        for shape, group in GROUPS:
            value = torch.randn(shape, generator=generator).to(dtype)
            self.params.append(nn.Parameter(place(value)))
            groups.append({"params": [self.params[-1]], **group})
        more = {"lr": 0.1, "max_grad_norm": 1.0} | options | more
        self.optimizer = build(groups, **more)

    def set_gradients(self, seed: int, without: tuple[int, ...] = ()) -> None:
        self.optimizer.zero_grad()
        whole = [nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in self.params]
        set_gradients(whole, seed=seed)
        for i, (p, w) in enumerate(zip(self.params, whole, strict=True)):
            p.grad = None if i in without else self.place(w.grad)

    def train(self, *seeds: int) -> Run:
        for seed in seeds:
            self.set_gradients(seed, without=(0, 3) if seed == 2 else ())
            self.optimizer.step()
        return self

    def weights(self) -> list[Tensor]:
        return [full_tensor(p) for p in self.params]

    def moments(self) -> list[Tensor]:
        states = [self.optimizer.state[p] for p in self.params]
        return [full_tensor(of(s)) for s in states for of in (momentum_of, averages_of)]


def placed(shape: tuple[int, ...], placements: list[Placement]) -> Callable[[Tensor], Tensor]:
    mesh = init_device_mesh("cpu", shape)

    def place(tensor: Tensor) -> Tensor:
        own = [p if not p.is_shard() or p.dim < tensor.dim() else Replicate() for p in placements]
        return distribute_tensor(tensor, mesh, own, src_data_rank=None)

    return place


def has_one_process_bits(layout: str, way: str) -> None:
    """Also where rows are scaled between steps, as QK-clip does."""
    alone, shared = Run(way=way), Run(placed(*layouts()[layout]), way)
    for run in (alone, shared):
        run.train(0, 1)
        for number, factors in ((0, [0.5, 1.0, 0.7, 2.0]), (6, [0.5, 0.7, 2.0])):
            run.optimizer.scale_(run.params[number], torch.tensor(factors))
        run.train(2, 3)
    assert_same_bits(shared.weights(), alone.weights())
    assert_same_bits(shared.moments(), alone.moments())
    assert float(alone.optimizer.control.clip_factor) < 1
    counted = int(shared.optimizer.control.orthogonalized)
    if layout not in ("rows", "rows of rows", "HSDP", "rectangles", "replicated inside"):
        assert counted == int(alone.optimizer.control.orthogonalized)  # no rank lacks an expert


def refuses_gradients_of_some_ranks() -> None:
    run = Run(placed(*layouts()["rows"])).train(0)
    twin = copy.deepcopy(run.optimizer)
    before = snapshot(run.optimizer)
    run.set_gradients(1, without=(3,) if dist.get_rank() else ())
    with pytest.raises(RuntimeError, match=r"parameter '3' has a gradient on ranks \[0\] only, of"):
        run.optimizer.step()
    assert snapshot(run.optimizer) == before
    run.train(1)
    for p, q in zip(run.params, twin.param_groups, strict=True):
        (q,) = q["params"]
        q.grad = p.grad
    twin.step()
    assert snapshot(twin) == snapshot(run.optimizer)


def a_rejected_step_changes_nothing() -> None:
    for clip in (1.0, None):
        run = Run(placed(*layouts()["rows"]), max_grad_norm=clip).train(0)
        before = snapshot(run.optimizer)
        run.set_gradients(1)
        if dist.get_rank() == 0:
            run.optimizer.param_groups[0]["lr"] = "fast"
        with pytest.raises(
            (RuntimeError, TypeError), match="rejected the step" if dist.get_rank() else "lr"
        ):
            run.optimizer.step()
        run.optimizer.param_groups[0]["lr"] = 0.1
        assert snapshot(run.optimizer) == before
        run.train(1)
        assert snapshot(run.optimizer) != before


def all_raise(run: Run, message: str, step: Callable[[], Any] | None = None) -> None:
    before = snapshot(run.optimizer)
    with pytest.raises((RuntimeError, TypeError), match=message):
        (step or run.optimizer.step)()
    assert snapshot(run.optimizer) == before


def ranks_with_other_settings_raise() -> None:
    for key, value in (("ns_steps", 3), ("num_heads", 2), ("ns_coefficients", (2.0, -1.5, 0.5))):
        run = Run(placed(*layouts()["rows"])).train(0)
        if dist.get_rank() == 0:
            run.optimizer.param_groups[0][key] = value
        run.set_gradients(1)
        all_raise(run, "other parameters, groups or settings of Muon")
    run = Run(placed(*layouts()["rows"])).train(0)
    more = nn.Parameter(run.place(torch.ones(8, 4)))
    if dist.get_rank() == 0:
        run.optimizer.add_param_group({"params": [more]})
    run.set_gradients(1)
    all_raise(run, "other parameters, groups or settings of Muon")


def a_rejection_after_the_norm_reaches_all() -> None:
    """As clipping before the step measures it: the ranks have their norm when one rejects."""
    run = Run(placed(*layouts()["rows"])).train(0)
    run.set_gradients(1)
    measured = measure_norm([run.optimizer])
    if dist.get_rank() == 0:
        run.optimizer.param_groups[0]["lr"] = "fast"
    message = "rank 0 rejected the step" if dist.get_rank() else "lr"
    step = partial(fused_step, [run.optimizer], ALONE._replace(measured=measured))
    all_raise(run, message, step)


def a_first_step_that_is_rejected_leaves_no_trace() -> None:
    run = Run(placed(*layouts()["rows"]))
    run.set_gradients(0, without=(3,) if dist.get_rank() else ())
    with pytest.raises(RuntimeError, match="has a gradient on ranks"):
        run.optimizer.step()
    run.set_gradients(0, without=(3,))
    run.optimizer.step()  # on no rank: one of them has state
    run.train(1)


def meshes_may_be_equal_or_cross() -> None:
    """Meshes of equal ranks share one exchange; where they cross, all ranks raise together."""
    meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) for _ in range(2)]
    for own in (meshes, [meshes[0]["a"], meshes[1]["a"]], [meshes[0]["a"], meshes[0]["b"]]):
        shapes = [(8, 12), (12, 8), (6, 10), (10, 6)]
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        alone = [nn.Parameter(value.clone()) for value in values]
        shared = [
            nn.Parameter(distribute_tensor(value, mesh, [ROWS] * mesh.ndim, src_data_rank=None))
            for value, mesh in zip(values, own * 2, strict=True)
        ]
        ours, one = FusedMuon(shared, lr=0.1), FusedMuon(alone, lr=0.1)
        for seed in range(2):
            set_gradients(alone, seed=seed)
            for p, q in zip(shared, alone, strict=True):
                p.grad = shard_of(q.grad, p)
            one.step()
            ours.step()
        assert_same_bits([full_tensor(p) for p in shared], [p.detach() for p in alone])
        for p, q in zip(shared, alone, strict=True):
            p.grad = shard_of(q.grad, p)
        if dist.get_rank() == 0:
            shared[0].grad = None
        if own == [meshes[0]["a"], meshes[1]["a"]] and dist.get_rank() % 2:
            ours.step()  # these ranks share nothing with rank 0
            continue
        with pytest.raises(RuntimeError, match=r"has a gradient on ranks|rejected the step"):
            ours.step()


@contextmanager
def failing_transfer(number: int) -> Iterator[None]:
    """Makes a transfer fail, counted from 1: on all ranks alike, so that no rank waits."""
    send, calls = dist.all_to_all_single, list[int]()

    def failing(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise RuntimeError("no route")
        return send(*args, **more)

    with mock.patch.object(dist, "all_to_all_single", failing):
        yield


def a_failing_transfer_names_what_was_stepped() -> None:
    """Also what is not sent: AdamW's parameters, and experts that are whole on their ranks."""
    for number in range(1, 9):
        run = Run(placed(*layouts()["rows"]), "NorMuon, fp32").train(0)
        run.set_gradients(1)

        def held(run: Run = run) -> list[list[Tensor]]:
            states = [(p, run.optimizer.state[p]) for p in run.params]
            kept = [(p, momentum_of(state), averages_of(state)) for p, state in states]
            return [[full_tensor(tensor).clone() for tensor in tensors] for tensors in kept]

        before = held()
        with (
            failing_transfer(number),
            pytest.raises(RuntimeError, match="no route") as raised,
        ):
            run.optimizer.step()
        named = re.findall(r"(?:stepped|weights): \[(.*?)\]", str(raised.value))
        stepped, averaged = ([int(n) for n in re.findall(r"\d+", text)] for text in named)
        after = held()
        assert {6, 9, 10} <= {*stepped}
        for n in range(len(GROUPS)):
            changed = [not torch.equal(a, b) for a, b in zip(after[n], before[n], strict=True)]
            rows = not {"beta2", "algorithm"} & GROUPS[n][1].keys()
            expected = [n in stepped, n in stepped + averaged, rows and n in stepped]
            assert changed == expected, (number, n)


def optimizers_that_step_before_are_named() -> None:
    """As those of a container's model parts."""
    runs = [Run(placed(*layouts()["rows"])).train(0) for _ in range(2)]
    for which, run in zip("ab", runs, strict=True):
        run.optimizer.parameter_names = [[f"{which}{n}"] for n in range(len(GROUPS))]
        run.set_gradients(1)
    before = [[weight.clone() for weight in run.weights()] for run in runs]
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent:
        twin = copy.deepcopy(runs[0].optimizer)
        for own, group in zip(runs[0].params, twin.param_groups, strict=True):
            group["params"][0].grad = own.grad
        twin.step()
    with (
        failing_transfer(sent.call_count + 1),
        pytest.raises(RuntimeError, match="no route") as raised,
    ):
        fused_step([run.optimizer for run in runs])
    named, _ = re.findall(r"(?:stepped|weights): \[(.*?)\]", str(raised.value))
    expected = [
        f"{which}{n}"
        for which, run, held in zip("ab", runs, before, strict=True)
        for n, pair in enumerate(zip(run.weights(), held, strict=True))
        if not torch.equal(*pair)
    ]
    assert re.findall(r"\w\d+", named) == expected
    assert len(expected) > len(GROUPS)


def momentum_of(state: dict[str, Any]) -> Any:
    return state.get("momentum_buffer", state.get("exp_avg"))


def averages_of(state: dict[str, Any]) -> Any:
    return state.get("second_momentum_buffer", torch.zeros(0))


def matrices_without_elements() -> None:
    place = placed(*layouts()["rows"])
    params = [nn.Parameter(place(torch.ones(shape))) for shape in ((0, 5), (6, 5), (0, 4, 4))]
    optimizer = FusedMuon(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()


def an_overflow_changes_nothing() -> None:
    run = Run(placed(*layouts()["rows"]), "NorMuon, fp32", skip_nonfinite=True).train(0)
    before = snapshot(run.optimizer)
    run.set_gradients(1)
    if dist.get_rank() == 0:
        run.params[2].grad._local_tensor[0, 0] = math.nan
    run.optimizer.step()
    assert snapshot(run.optimizer) == before
    assert float(run.optimizer.control.skipped_steps) == 1
    assert float(run.optimizer.control.orthogonalized) == 0


def changes_between_steps_are_followed() -> None:
    """Frozen, replaced, added, and with other settings: as in one process."""
    runs = [Run(), Run(placed(*layouts()["rows"]))]
    for run in runs:
        run.train(0)
        run.params[2].requires_grad_(False)
        run.params[2].grad = None
        run.set_gradients(1, without=(2,))
        run.optimizer.step()
        run.params[2].requires_grad_(True)
        run.optimizer.param_groups[3].update(ns_steps=3, ns_coefficients=(2.0, -1.5, 0.5))
        state = run.optimizer.state[run.params[0]]
        state["momentum_buffer"] = state["momentum_buffer"].clone()
        with torch.no_grad():
            run.params[1].mul_(2.0)
        run.train(3, 4)
        generator = torch.Generator().manual_seed(5)
        run.params.append(nn.Parameter(run.place(torch.randn(12, 5, generator=generator))))
        run.optimizer.add_param_group({"params": [run.params[-1]]})
        run.train(5)
    assert_same_bits(runs[1].weights(), runs[0].weights())


def normuon_over_bf16() -> None:
    """Directions travel in 16 bits, and the averages of rows beside them in 32."""
    place = placed(*layouts()["rows"])
    runs = []
    for held in (lambda t: t, place):
        generator = torch.Generator().manual_seed(1)
        shapes = ((7, 9), (24, 41), (1, 5), (3, 8, 11))
        params = [nn.Parameter(held(torch.randn(s, generator=generator))) for s in shapes]
        optimizer = FusedMuon(params, lr=0.1, beta2=0.9, orthogonalize_dtype=torch.bfloat16)
        for _ in range(3):
            for p, shape in zip(params, shapes, strict=True):
                p.grad = held(torch.randn(shape, generator=generator))
            with counted_bytes() as sent:
                optimizer.step()
        states = [full_tensor(averages_of(optimizer.state[p])) for p in params]
        runs.append([*(full_tensor(p) for p in params), *states])
    for ours, alone in zip(*runs, strict=True):
        torch.testing.assert_close(ours, alone, rtol=0.02, atol=0.02)
    world, cut = dist.get_world_size(), shapes[:3]  # experts are whole
    total = sum(gathered(sum(sent)))
    if world > 1:
        elements, rows = sum(map(math.prod, cut)), sum(shape[0] for shape in cut)
        assert 0 < total <= 2 * (2 * elements + 4 * rows)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Records the bytes that this rank sends to others in all-to-alls."""
    sent: list[int] = []
    send = dist.all_to_all_single

    def counting(output: Any, source: Any, out: Any, into: list[int], **more: Any) -> Any:
        sent.append(sum(n for rank, n in enumerate(into) if rank != dist.get_rank()))
        return send(output, source, out, into, **more)

    with mock.patch.object(dist, "all_to_all_single", counting):
        yield sent


def bytes_are_those_of_the_formula() -> None:
    """Directions go to owners and back: 8 P / W (W - 1) / W bytes a rank, in fp32."""
    world = dist.get_world_size()
    place = placed((world,), [ROWS])
    params = [nn.Parameter(place(torch.randn(24 * k, 48))) for k in range(1, 25)]
    optimizer = FusedMuon(params)
    for p in params:
        p.grad = place(torch.randn(p.shape))
    with counted_bytes() as sent:
        optimizer.step()
    total = sum(gathered(sum(sent)))
    elements = sum(p.numel() for p in params)
    assert total <= 1.02 * 8 * elements * (world - 1) / world


def fsdp_trains_like_one_process(**options: Any) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))
    model = copy.deepcopy(alone)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
        layer.set_force_sum_reduction_for_comms(True)
    batches = [torch.randn(dist.get_world_size(), 6, 12) for _ in range(3)]

    def trained(module: nn.Module, inputs: Callable[[Tensor], Tensor]) -> list[Tensor]:
        matrices = [p for p in module.parameters() if p.dim() == 2]
        vectors = [p for p in module.parameters() if p.dim() == 1]
        optimizer = FusedMuon(
            [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}], lr=0.02,
            max_grad_norm=0.1, **options,
        )  # fmt: skip
        for batch in batches:
            optimizer.zero_grad()
            module(inputs(batch)).square().mean().backward()
            optimizer.step()
        assert int(optimizer.control.orthogonalized) == 2
        return [full_tensor(p) for p in module.parameters()]

    expected = trained(alone, lambda batch: batch.flatten(0, 1))
    actual = trained(model, lambda batch: batch[dist.get_rank()])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-5)


def blocks_with_factors_of_their_own_draw_alike(*placements: Placement) -> None:
    """Random rounding counts elements of the whole parameter, also in rows of a cut block."""
    world = dist.get_world_size()
    mesh = (2, world // 2) if len(placements) == 2 else (world,)
    place, runs = placed(mesh, [*placements]), []
    for cut in (lambda tensor: tensor, place):
        generator = torch.Generator().manual_seed(0)
        groups = []
        sizes = ((48, 20), (24, 12, 12)), ((5, 48, 6), (30, 14, 4)), ((5, 48, 6), None)
        for shape, blocks in sizes:
            value = torch.randn(shape, generator=generator).bfloat16()
            param = nn.Parameter(cut(value))
            param.grad = cut(torch.randn(shape, generator=generator).bfloat16())
            groups.append({"params": [param], "split_sizes": blocks})
        optimizer = FusedMuon(groups, lr=0.1, stochastic_rounding=True)
        optimizer.step()
        runs.append([full_tensor(group["params"][0]) for group in groups])
    assert_same_bits(runs[1], runs[0])


def digests_add_up(layout: str, way: str) -> None:
    alone = Run(way=way).train(0, 1)
    shared = Run(placed(*layouts()[layout]), way).train(0, 1)
    ours = digest(shared.optimizer)
    dist.all_reduce(ours)
    own = [
        not isinstance(p, DTensor) or any(q.is_shard() for q in p.placements) for p in shared.params
    ]
    expected = digest(alone.optimizer)
    assert all(int(a) == int(b) for a, b, cut in zip(ours, expected, own, strict=True) if cut)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 14, bias=False), nn.Linear(14, 6, bias=False)
        self.norm = nn.LayerNorm(10)


def resumes_on_other_ranks(folder: Path, **options: Any) -> None:
    """Saved by the world before, under the parameters' names, and loaded here, then saved again."""
    torch.manual_seed(0)
    alone = Model()
    model = fully_shard(copy.deepcopy(alone))

    def optimizer_of(module: nn.Module) -> FusedMuon:
        named = dict(module.named_parameters())
        matrices = [(n, named[n]) for n in ("first.weight", "second.weight")]
        return FusedMuon(
            [{"params": matrices},
             {"params": [(n, p) for n, p in named.items() if p.dim() == 1], "algorithm": "adamw"}],
            lr=0.05, **options,
        )  # fmt: skip

    def step(module: nn.Module, optimizer: FusedMuon, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in module.parameters():
            gradient = torch.randn(p.shape, generator=generator)
            sharded = isinstance(p, DTensor)
            p.grad = shard_of(gradient, p) if sharded else gradient
        optimizer.step()

    one, ours = optimizer_of(alone), optimizer_of(model)
    done = len(list(folder.glob("saved*")))
    for seed in range(2 * done):
        step(alone, one, seed)
    if done:
        saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, ours)}
        ours.init_state()
        saved["optimizer"] = get_optimizer_state_dict(model, ours)
        dcp.load(saved, checkpoint_id=folder / f"saved{done}")
        model.load_state_dict(saved["model"])
        set_optimizer_state_dict(model, ours, saved["optimizer"], options=StateDictOptions())
    for seed in (2 * done, 2 * done + 1):
        step(alone, one, seed)
        step(model, ours, seed)
    assert_same_bits([full_tensor(p) for p in model.parameters()], list(alone.parameters()))
    dist.barrier()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, ours)}
    dcp.save(state, checkpoint_id=folder / f"saved{done + 1}")


def cases() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        f"{layout}, {way}": partial(has_one_process_bits, layout, way)
        for layout in layouts()
        for way in (WAYS | NORMUON if layout == "rows" else ["fp32", "NorMuon, fp32"])
    }
    among_several = (
        refuses_gradients_of_some_ranks, ranks_with_other_settings_raise,
        a_first_step_that_is_rejected_leaves_no_trace, a_failing_transfer_names_what_was_stepped,
        optimizers_that_step_before_are_named,
    )  # fmt: skip
    for case in (
        *(among_several if dist.get_world_size() > 1 else ()), a_rejected_step_changes_nothing,
        a_rejection_after_the_norm_reaches_all, matrices_without_elements,
        an_overflow_changes_nothing, changes_between_steps_are_followed,
        bytes_are_those_of_the_formula, normuon_over_bf16,
    ):  # fmt: skip
        found[case.__name__] = case
    for name, options in {"": {}, ", NorMuon": {"beta2": 0.9}}.items():
        found[f"FSDP2{name}"] = partial(fsdp_trains_like_one_process, **options)
        folder = Path(sys.argv[1]).parent / f"muon{name}"
        found[f"resumes{name}"] = partial(resumes_on_other_ranks, folder, **options)
    for way in ("fp32", "NorMuon, fp32"):
        for layout in ("rows", "columns"):
            found[f"digests, {layout}, {way}"] = partial(digests_add_up, layout, way)
    cuts = [(ROWS,), (COLUMNS,), (Shard(2),)]
    if dist.get_world_size() == 4:
        found["meshes"] = meshes_may_be_equal_or_cross
        cuts += [(ROWS, COLUMNS), (COLUMNS, Shard(2)), (COLUMNS, COLUMNS)]
    for cut in cuts:
        draws = partial(blocks_with_factors_of_their_own_draw_alike, *cut)
        found[f"draws, {cut}"] = draws
    return found


if __name__ == "__main__":
    run_cases(cases)
