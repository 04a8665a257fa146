"""Whatever users do between steps, states on the host have the bits of those beside parameters.

Two optimizers do the same: the states of one move, and its steps take every path. The memory of
parameters stands for a GPU's, and simulated streams (tests/support/late_stream.py) end as late as a
GPU's may. In `make test-host-cuda` the CUDA back end makes the steps.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor, nn

from torchopt_ext.optim import host_steps

from ...support.compare import snapshot
from ...support.late_stream import LateStreams, stand_for_a_gpu
from ...support.problems import make_params, set_gradients, through_file
from ...support.ways import KINDS, WAYS, is_possible

SHAPES = ((3, 4), (7,), (130, 65), (2, 1031), (0, 2), (), (1, 33_003))
PATHS = st.sampled_from(["mapped", "staged", "host"])
SEEDS = st.integers(0, 99)
NUMBERS = st.integers(0, 9)  # of parameters, modulo how many there are
FLAGS = st.booleans()


class Layer(nn.Module):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params)

    def forward(self) -> None: ...


class MovedStates(RuleBasedStateMachine):
    @initialize(
        kind_and_way=st.sampled_from([(k, w) for k in KINDS for w in WAYS if is_possible(k, w)]),
        clips=FLAGS, skips=FLAGS, averages=st.sampled_from([None, "fp32", "bf16"]),
        fraction=st.sampled_from([1.0, 0.5]), path=PATHS, bucket=st.sampled_from([1, 30_000]),
        seed=SEEDS,
    )  # fmt: skip
    def build(
        self, kind_and_way: Any, clips: bool, skips: bool, averages: str | None,
        fraction: float, path: str, bucket: int, seed: int,
    ) -> None:  # fmt: skip
        self.late = LateStreams(early=0.3, seed=seed)
        self.patch = pytest.MonkeyPatch()
        stand_for_a_gpu(self.patch, self.late)
        self.patch.setattr(host_steps, "_BUCKET", bucket)
        kind, self.way = kind_and_way
        options: dict[str, Any] = {"lr": 0.02, "skip_nonfinite": skips, "rounding_seed": 5}
        if clips:
            options["max_grad_norm"] = 3.0
        if averages is not None:
            options |= {"ema_decay": 0.9, "ema_dtype": averages}
        moved = {"state_device": "cpu", "state_fraction": fraction, "offload_step": path}
        self.pairs = [
            WAYS[self.way].build(kind, shapes=SHAPES, **options, **more) for more in ({}, moved)
        ]
        self.late.optimizers.append(self.pairs[1][1])
        self.saved: list[Any] = []

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.wait()
            assert snapshot(self.pairs[0][1]) == snapshot(self.pairs[1][1])
            torch.set_num_threads(2)
            self.patch.undo()

    def wait(self) -> None:
        for _, optimizer in self.pairs:
            optimizer.wait_for_params()

    @rule(
        count=st.integers(1, 3), seed=SEEDS, missing=NUMBERS | st.none(),
        infinite=NUMBERS | st.none(), wide=FLAGS, strided=FLAGS, tensor=FLAGS,
    )  # fmt: skip
    def steps(
        self, count: int, seed: int, missing: int | None, infinite: int | None, wide: bool,
        strided: bool, tensor: bool,
    ) -> None:  # fmt: skip
        for i, (params, optimizer) in itertools.product(range(count), self.pairs):
            for p in params:
                p.grad = None
                p.grad_dtype = torch.float32 if wide and p.dtype.itemsize == 2 else p.dtype
            set_gradients([p for p in params if p.requires_grad], seed=seed + i)
            if infinite is not None and (g := params[infinite % len(params)].grad) is not None:
                g.fill_(torch.inf)
            if missing is not None:
                params[(missing + i) % len(params)].grad = None
            if strided and (g := params[2].grad) is not None:
                params[2].grad = g.t().contiguous().t()
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(0.01) if tensor else 0.02 + i / 100
            optimizer.step()
        assert len({float(optimizer.control.skipped_steps) for _, optimizer in self.pairs}) == 1

    @rule(seed=SEEDS)  # more steps than anything else
    def usual_steps(self, seed: int) -> None:
        self.steps(2, seed, None, None, False, False, False)

    @rule(path=PATHS)
    def take_path(self, path: str) -> None:
        self.pairs[1][1].offload_step = path

    @rule(device=st.sampled_from(["cuda", "cpu"]))
    def move(self, device: str) -> None:
        self.pairs[1][1].move_state(device)

    @rule(threads=st.sampled_from([1, 2]))
    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    @rule(overlaps=FLAGS)
    def overlap(self, overlaps: bool) -> None:
        params, optimizer = self.pairs[1]
        self.layers = [Layer(params[:2]), Layer(params[2:4])] if overlaps else []
        optimizer.overlap_forward(*self.layers)

    @rule(number=NUMBERS, trains=FLAGS)
    def freeze(self, number: int, trains: bool) -> None:
        for params, _ in self.pairs:
            param = params[number % len(params)].requires_grad_(trains)
            param.grad = param.grad if trains else None

    @rule(number=NUMBERS, through_data=FLAGS)
    def write_weight(self, number: int, through_data: bool) -> None:
        self.wait()
        for params, _ in self.pairs:
            param = params[number % len(params)]
            param.data = param.data.clone()
            with torch.no_grad():
                (param.data if through_data else param).mul_(0.5)

    @rule(number=NUMBERS, what=st.sampled_from(["write", "replace", "drop", "drop all"]))
    def change_state(self, number: int, what: str) -> None:
        self.wait()
        for params, optimizer in self.pairs:
            state = optimizer.state.get(params[number % len(params)], {})
            for name, value in [*state.items()]:
                if isinstance(value, Tensor) and name != "step" and what == "replace":
                    state[name] = value.clone()
                elif name == "exp_avg" and what == "write" and value.is_floating_point():
                    value.mul_(0.5)
            if what == "drop":
                optimizer.state.pop(params[number % len(params)], None)
            elif what == "drop all":
                optimizer.state.clear()

    @rule(number=NUMBERS)
    def scale(self, number: int) -> None:
        for params, optimizer in self.pairs:
            if params[number % len(params)].dim() and params[number % len(params)].numel():
                optimizer.scale_(params[number % len(params)], torch.tensor([0.5]))

    @rule()
    def refresh_masters(self) -> None:
        for _, optimizer in self.pairs:
            optimizer.refresh_masters()

    @rule()
    def init_state(self) -> None:
        for _, optimizer in self.pairs:
            optimizer.init_state()

    @rule(seed=SEEDS, shape=st.sampled_from([(5, 6), (64, 64), (33, 3)]))
    def add_param(self, seed: int, shape: tuple[int, ...]) -> None:
        for params, optimizer in self.pairs:
            params += make_params([shape], WAYS[self.way].dtype, seed=seed)
            optimizer.add_param_group({"params": params[-1:]})

    @rule()
    def save(self) -> None:
        self.saved = [through_file(optimizer.state_dict()) for _, optimizer in self.pairs]

    @rule(crossed=FLAGS)
    def load(self, crossed: bool) -> None:
        saved = self.saved[::-1] if crossed else self.saved
        if saved and len(saved[0]["param_groups"]) == len(self.pairs[0][1].param_groups):
            for (_, optimizer), state_dict in zip(self.pairs, saved, strict=True):
                optimizer.load_state_dict(copy.deepcopy(state_dict))

    @rule(pickled=FLAGS)
    def go_on_with_copies(self, pickled: bool) -> None:
        self.wait()
        for _, optimizer in self.pairs:
            optimizer.zero_grad()
        pairs = self.pairs
        self.pairs = [pickle.loads(pickle.dumps(p)) if pickled else copy.deepcopy(p) for p in pairs]
        self.late.optimizers[:] = [self.pairs[1][1]]

    @rule()
    def exchange_averages(self) -> None:
        for params, optimizer in self.pairs:
            if optimizer.ema_decay is not None:
                with optimizer.ema_weights(), torch.no_grad():
                    params[0].mul_(0.5)


@pytest.mark.parametrize("examples", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_same_bits_whatever_happens_between_steps(examples: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=40,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],  # a failure's report is long, but shrinking it takes minutes
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(MovedStates, settings=chosen)
