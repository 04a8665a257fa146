"""8-bit moments match the formulas of docs/numerics.md section 11, written in numpy."""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from torchopt_ext import FusedAdamW
from torchopt_ext.optim.estimate import estimate
from torchopt_ext.state.algorithms import ADAM
from torchopt_ext.state.quantized import can_quantize

from ...support import oracle
from ...support.compare import assert_same, assert_same_bits, bits, unchanged
from ...support.oracle import Floats, fma
from ...support.problems import make_params

CODES = {m.codes: torch.uint8 if m.as_root else torch.int8 for m in ADAM.moments}

F = np.float32
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1
ENTRIES = ["exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scale_v2", "exp_avg_sq_scale_v2"]


def gradients(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns gradients of many magnitudes, with one group of zeros."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    g[0, :64] = 0
    return g.to(dtype)


def params(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return make_params(shapes, dtype, seed=9)


class Reference:
    """A parameter with rows of 200 elements: its float32 weight, codes and scales."""

    def __init__(self, weight: Tensor, rounding: tuple[int, int] | None) -> None:
        self.weight = weight.detach().float().numpy().copy()
        self.codes = [np.zeros(weight.shape, np.int64), np.zeros(weight.shape, np.int64)]
        self.scales = [np.zeros((weight.shape[0], 4), F), np.zeros((weight.shape[0], 4), F)]
        self.rounding = rounding  # rounding seed and parameter number
        self.count = 0

    def step(self, gradient: Tensor, factor: float = 1.0, scales: bool = False) -> None:
        self.count += 1
        bc1, bc2 = 1 - BETAS[0] ** self.count, 1 - BETAS[1] ** self.count
        size, eps = F(LR / bc1 * math.sqrt(bc2)), F(EPS * math.sqrt(bc2))
        each = np.arange(200) // 64
        codes = [code.astype(F) for code in self.codes]
        g = gradient.float().numpy()
        factor, weight = (F(factor), F(1)) if scales else (F(1), F(factor))
        g = g * factor
        units = F(1 - BETAS[0]) * weight, np.sqrt(F(1 - BETAS[1])) * weight
        m = fma(codes[0], (self.scales[0] * (F(BETAS[0]) / units[0]))[:, each], g)
        root = (codes[1] + F(1)) * (self.scales[1] * (np.sqrt(F(BETAS[1])) / units[1]))[:, each]
        root = np.sqrt(fma(root, root, g * g))
        self.weight = fma(F(-LR * DECAY), self.weight, self.weight)
        size = size * F(float.fromhex("0x1.5a1ce2p+1")) * units[0]
        divisor = fma(root, np.broadcast_to(units[1] / size, root.shape), eps / size)
        divisor = np.minimum(divisor, F(float.fromhex("0x1.6a09e6p126")))
        guess = (np.uint32(0xFEB504F3) - divisor.view(np.uint32)).view(F)
        from_mean = fma(divisor, guess, F(float.fromhex("0x1.13a592p+0")))
        corrected = fma(from_mean, from_mean, F(float.fromhex("0x1.8ba59p-2")))
        self.weight = fma(m * guess, corrected, self.weight)
        for k, (moment, most) in enumerate(((m, 127), (root, 256))):
            starts = [0, 64, 128, 192]
            step = np.maximum.reduceat(abs(moment), starts, axis=1) / F(most)
            self.scales[k] = step * units[k]
            inverse = (F(1) / np.maximum(step, F(2**-126)))[:, each]
            code = fma(moment, inverse, self.added(k, moment.shape) - F((0.5, 1)[k]))
            code = np.rint(code).clip(-128, 127) if k == 0 else np.trunc(code).clip(0, 255)
            self.codes[k] = code.astype(np.int64)

    def added(self, k: int, shape: tuple[int, ...]) -> Floats:
        """Returns the numbers in [0, 1) added to the codes of exp_avg (k = 0) or of the root."""
        if self.rounding is not None:
            numbers = np.arange(math.prod(shape), dtype=np.uint64)
            seed, number = self.rounding
            draws = oracle.draws(seed, self.count, number, numbers, k + 1)
            return draws.astype(F).reshape(shape) * F(2**-16)
        by_step, by_place = ((2447445414, 3242174889), (3242174889, 2447445414))[k]
        places = np.arange(200, dtype=np.uint64) % np.uint64(64) * np.uint64(by_place)
        bits = (np.uint64(self.count * by_step) + places) % np.uint64(2**32)
        return (bits >> np.uint64(8)).astype(F) * F(2**-24)


def assert_held(state: dict[str, Tensor], expected: Reference) -> None:
    for k, name in enumerate(("exp_avg", "exp_avg_sq")):
        assert np.array_equal(state[f"{name}_codes"].numpy(), expected.codes[k]), name
        assert np.array_equal(state[f"{name}_scale_v2"].numpy(), expected.scales[k]), name


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("master", "stochastic"),
    # With an 8-bit remainder the weight would be rounded at random as well.
    [(m, r) for m in (None, "fp32", "remainder", "remainder8") for r in (False, True)][:-1],
)
def test_a_step_to_the_bit(master: str | None, grad_dtype: torch.dtype, stochastic: bool) -> None:
    weights = params(torch.float32 if master is None else torch.bfloat16, (3,), (5, 200))
    expected = Reference(weights[1], (7, 1) if stochastic else None)
    optimizer = FusedAdamW(
        weights, LR, BETAS, EPS, DECAY, master_weights=master, state_dtype="int8",
        stochastic_rounding=stochastic, rounding_seed=7, track=True,
    )  # fmt: skip
    for step in range(6):
        weights[1].grad = None
        weights[1].grad_dtype = grad_dtype
        weights[1].grad = gradients(5, 200, seed=step, dtype=grad_dtype)
        optimizer.step()
        expected.step(weights[1].grad)
        state = optimizer.state[weights[1]]
        got = state["master_weight"] if master == "fp32" else weights[1].detach()
        if master in ("remainder", "remainder8"):
            got = oracle.floats(oracle.join(weights[1], state[master])).view(5, 200)
            split, unit = (oracle.split, 1) if master == "remainder" else (oracle.split8, 256)
            high, low = split(expected.weight.view(np.uint32).astype(np.uint64))
            exact = (high << np.uint64(16)).astype(np.int64) + unit * low
            expected.weight = exact.astype(np.uint32).view(np.float32)
        assert np.array_equal(got.numpy(), expected.weight)
        assert_held(state, expected)
    assert {name: state[name].dtype for name in CODES} == CODES
    assert not state["exp_avg_scale_v2"][0, 0] and not state["exp_avg_codes"][0, :64].any()


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {"max_grad_norm": 0.3}),
        (1e12, {"max_grad_norm": 0.3}),
        (1e25, {"max_grad_norm": 0.3}),  # squares overflow before clipping
        (1, {"max_grad_norm": 0.0}),
        (1, {"maximize": True}),
        (1e-12, {"maximize": True}),
    ],
)
def test_gradients_scaled_to_the_bit(size: float, options: dict[str, Any]) -> None:
    weights = params(torch.float32, (5, 200))
    expected = Reference(weights[0], None)
    optimizer = FusedAdamW(weights, LR, BETAS, EPS, DECAY, state_dtype="int8", **options)
    for step in range(4):
        weights[0].grad = gradients(5, 200, seed=step) * size
        optimizer.step()
        factor = optimizer.control.grad_factor.item() * (-1 if "maximize" in options else 1)
        expected.step(weights[0].grad, factor, scales=not 2**-16 <= factor <= 1)
        assert np.array_equal(weights[0].detach().numpy(), expected.weight)
        assert_held(optimizer.state[weights[0]], expected)


@pytest.mark.parametrize("lr", [0.0, 1e-30])
def test_steps_of_no_size_change_no_weight(lr: float) -> None:
    weights = params(torch.float32, (5, 200))
    weights[0].data[0, 64:] = torch.tensor([0.0, -0.0, 1e-40, 1e38]).repeat(34)
    optimizer = FusedAdamW(weights, lr, BETAS, EPS, 0.0, state_dtype="int8")
    before = weights[0].detach().clone()
    for size in (1e-16, 1, 1e25):
        weights[0].grad = gradients(5, 200) * size
        optimizer.step()
    assert torch.equal(weights[0], before)  # -0.0 may become 0.0
    assert optimizer.state[weights[0]]["exp_avg_codes"].any()


@pytest.mark.parametrize("size", [2e19, 1e25, 3e38])
def test_squares_that_overflow_move_no_weight(size: float) -> None:
    weights = params(torch.float32, (5, 200))
    before = weights[0].detach().clone()
    optimizer = FusedAdamW(weights, LR, BETAS, EPS, 0.0, state_dtype="int8")
    weights[0].grad = torch.full((5, 200), size)
    optimizer.step()
    torch.testing.assert_close(weights[0], before, rtol=0, atol=1e-15)


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_updates_are_adams(eps: float) -> None:
    """The first update of each element has the size of the step."""
    weights = params(torch.float32, (8, 64))
    weights[0].data.zero_()
    sizes = 10.0 ** torch.arange(-6, 10, 2).view(8, 1)
    weights[0].grad = gradients(8, 64, seed=3).sign() * (1 + torch.rand(8, 64)) * sizes
    FusedAdamW(weights, LR, BETAS, eps, 0.0, state_dtype="int8").step()
    exact = -LR * weights[0].grad.double() / (weights[0].grad.double().abs() + eps)
    torch.testing.assert_close(weights[0].double(), exact.nan_to_num(0), rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("stochastic", "digest"),
    [
        (False, "8088096d7f712113f12d19bf0fd2266bedd1621b3e430234f67c07a8307f56b8"),
        (True, "037415f587774d2249eff340f76f809f5bbb090e88ed964347286af99b053db2"),
    ],
    ids=["dithered", "random"],
)
def test_the_format_is_the_one_of_saved_states(stochastic: bool, digest: str) -> None:
    """Pins the bytes that steps store: other bytes may decode older states differently."""

    def spread(seed: int) -> Tensor:  # exact in float32, of magnitudes from 2^-27 to 2^3
        words = (np.arange(1000, dtype=np.uint64) + np.uint64(seed * 1000)) * np.uint64(2654435761)
        words = words % np.uint64(2**32)
        signed = (words >> np.uint64(16)).astype(F) - F(2**15)
        scale = np.ldexp(F(1), -(words % np.uint64(16)).astype(np.int32) - 12)
        return torch.from_numpy((signed * scale).reshape(5, 200))

    weights = [nn.Parameter(spread(0))]
    optimizer = FusedAdamW(
        weights, LR, BETAS, EPS, DECAY, state_dtype="int8",
        stochastic_rounding=stochastic, rounding_seed=7,
    )  # fmt: skip
    for step in range(1, 6):
        weights[0].grad = spread(step)
        weights[0].grad[0, :64] = 0
        optimizer.step()
    state = optimizer.state[weights[0]]
    stored = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in ENTRIES))
    assert stored.hexdigest() == digest


def stepped(weights: list[nn.Parameter], grads: list[list[Tensor]], **options: Any) -> FusedAdamW:
    optimizer = FusedAdamW(weights, LR, state_dtype="int8", **options)
    for step in grads:
        for param, grad in zip(weights, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return optimizer


def test_rows_threads_and_order_change_no_bit() -> None:
    (whole,) = params(torch.bfloat16, (700, 200))
    pieces = [nn.Parameter(whole.detach()[a:b].clone()) for a, b in ((0, 300), (300, 700))]
    grads = [gradients(700, 200, seed=s, dtype=torch.bfloat16) for s in range(3)]
    options = {"master_weights": "remainder", "max_grad_norm": 1.0}
    expected = stepped([whole], [[g] for g in grads], **options).state[whole]
    torch.set_num_threads(1)
    optimizer = stepped(pieces[::-1], [[g[300:], g[:300]] for g in grads], **options)
    assert whole.equal(torch.cat([p.detach() for p in pieces]))
    for name in [*ENTRIES, "remainder"]:
        assert torch.cat([optimizer.state[p][name] for p in pieces]).equal(expected[name]), name


def test_gradients_are_only_read(tmp_path: Path) -> None:
    """A step only reads gradients: read-only memory works, also where a group is short."""
    np.full((5, 100), 0.5, F).tofile(tmp_path / "gradient")
    gradient = np.memmap(tmp_path / "gradient", F, "r", shape=(5, 100))
    weights = params(torch.float32, (5, 100))
    optimizer = FusedAdamW(weights, LR, state_dtype="int8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the array is not writable
        weights[0].grad = torch.from_numpy(gradient)
    optimizer.step()
    assert optimizer.state[weights[0]]["exp_avg_codes"].ge(126).all()


def test_which_parameters() -> None:
    weights = params(torch.bfloat16, (8, 64), (8, 4, 16), (8, 63), (512,), (1, 70))
    weights.append(nn.Parameter(torch.randn(64, 8).t()))
    weights.append(nn.Parameter(torch.randn(8, 64, dtype=torch.float64)))
    optimizer = FusedAdamW(weights[:-1], state_dtype=torch.int8)
    optimizer.init_state()
    quantized = ["exp_avg_codes" in optimizer.state[p] for p in weights[:-1]]
    assert quantized == [True, True, False, False, True, False]
    assert optimizer.state[weights[2]]["exp_avg_sq"].dtype == torch.float32
    assert optimizer.state[weights[1]]["exp_avg_sq_scale_v2"].shape == (8, 1)
    assert optimizer.state[weights[4]]["exp_avg_scale_v2"].shape == (1, 2)


def test_what_is_not_finite() -> None:
    weights = params(torch.float32, (3, 128))
    optimizer = stepped(weights, [[gradients(3, 128)]])
    state = optimizer.state[weights[0]]
    weights[0].grad = gradients(3, 128, seed=1)
    negative = torch.tensor(-(1 << 22), dtype=torch.int32).view(torch.float32)  # x86's NaN
    for place, special in (((0, 3), math.nan), ((1, 70), math.inf), ((2, 5), negative)):
        weights[0].grad[place] = special
    optimizer.skip_nonfinite = True
    with unchanged(*weights, state):
        optimizer.step()
    optimizer.skip_nonfinite = False
    optimizer.step()
    scales = torch.stack([state["exp_avg_scale_v2"], state["exp_avg_sq_scale_v2"]])
    assert scales.isfinite().tolist() == [[[False, True], [True, False], [False, True]]] * 2
    assert (~weights[0].isfinite()).nonzero().tolist() == [[0, 3], [1, 70], [2, 5]]
    for row in (0, 2):  # independent of the instruction set
        assert (state["exp_avg_codes"][row, :64] == -128).all()
        assert not state["exp_avg_sq_codes"][row, :64].any()


def test_second_moments_follow_slow_changes() -> None:
    """The second moment follows changes of less than a code, which nearest rounding would lose."""
    weights = [nn.Parameter(torch.zeros(1, 64))]
    optimizer = FusedAdamW(weights, lr=0.0, state_dtype="int8", betas=(0.9, 0.999))
    grad = torch.full((1, 64), 1.0)
    for step in range(1500):
        grad[0, 1:] = 1.0 if step < 500 else 0.0
        weights[0].grad = grad
        optimizer.step()
    state = optimizer.state[weights[0]]
    v = ((state["exp_avg_sq_codes"].float() + 1) * state["exp_avg_sq_scale_v2"]).square()[0, 1:]
    exact = (1 - 0.999**500) * 0.999**1000
    assert abs(v.mean().item() / exact - 1) < 0.05


def test_bytes_held_and_moved() -> None:
    weights = params(torch.bfloat16, (30, 256), (5, 100), (70,))
    options: dict[str, Any] = {"master_weights": "remainder", "state_dtype": "int8"}
    optimizer = FusedAdamW(weights, **options)
    optimizer.init_state()
    held = sum(
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    )
    (rank,) = estimate(weights, **options)
    groups = 30 * 4 + 5 * 2
    assert rank.moments == held == 2 * (30 * 256 + 500) + 8 * 70 + 8 * groups
    moved = (30 * 256 + 500) * (2 + 2 + 8 + 4) + 70 * (2 + 2 + 8 + 16) + 16 * groups
    assert rank.moved == moved
    assert [r.moments for r in estimate(weights, sharding="fsdp", world_size=2, **options)] == [
        2 * (15 * 256 + 300) + 8 * 35 + 8 * (15 * 4 + 3 * 2),
        2 * (15 * 256 + 200) + 8 * 35 + 8 * (15 * 4 + 2 * 2),
    ]
    for sharding in ("zero1", "zero2"):
        ranks = estimate(weights, sharding=sharding, world_size=3, bucket_elements=4096, **options)
        assert sum(r.moments for r in ranks) == rank.moments


def test_a_dtensor_has_scales_placed_as_it_is(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    (plain,) = params(torch.bfloat16, (6, 200))
    sharded = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
    expected = stepped([plain], [[gradients(6, 200).bfloat16()]]).state[plain]
    grad = distribute_tensor(gradients(6, 200).bfloat16(), mesh, [Shard(0)])
    state = stepped([sharded], [[grad]]).state[sharded]
    for name in ENTRIES:
        assert state[name].placements == (Shard(0),)
        assert state[name].full_tensor().equal(expected[name])
    assert state["exp_avg_scale_v2"].shape == (6, 4)


@pytest.mark.parametrize(
    ("shape", "dim", "fits"),
    [((6, 200), 0, True), ((6, 128), 1, True), ((6, 200), 1, False), ((6, 2, 128), 2, False)],
)
def test_a_shard_that_cuts_rows_inside_a_group_keeps_floats(
    second_of_two_ranks: Any, shape: tuple[int, ...], dim: int, fits: bool
) -> None:
    whole = torch.zeros(shape)
    param = distribute_tensor(whole, second_of_two_ranks, [Shard(dim)], src_data_rank=None)
    assert can_quantize(param) == fits
    assert not can_quantize(DTensor.from_local(whole, second_of_two_ranks, [Partial()]))


CONVERSIONS: dict[str, tuple[Any, Any]] = {
    "channels_last": (lambda m: m.to(memory_format=torch.channels_last), "int8"),
    "double": (lambda m: m.double(), None),  # needs fp64 moments
}


@pytest.mark.parametrize("kind", CONVERSIONS)
@pytest.mark.parametrize("loaded", [False, True], ids=["converted later", "loaded"])
def test_codes_of_a_parameter_that_can_hold_none_become_floats(kind: str, loaded: bool) -> None:
    """They decode exactly, and come back with a layout that can hold them."""
    module, floats = (nn.Conv2d(16, 5, 3, bias=False) for _ in range(2))
    optimizer = FusedAdamW(module.parameters(), state_dtype="int8")
    module.weight.grad = gradients(*module.weight.shape)
    optimizer.step()
    module.weight.grad = None
    saved, (change, state_dtype) = copy.deepcopy(optimizer.state_dict()), CONVERSIONS[kind]
    floats.load_state_dict(module.state_dict())
    for each in (module, floats):
        change(each)
    expected = FusedAdamW(floats.parameters())
    expected.load_state_dict(saved)
    if loaded:
        optimizer = FusedAdamW(module.parameters(), state_dtype=state_dtype)
        optimizer.load_state_dict(saved)
    for each, by in ((module, optimizer), (floats, expected)):
        each.weight.grad = torch.ones_like(each.weight)
        by.step()
    assert_same_bits([module.weight], [floats.weight])
    assert_same(optimizer.state[module.weight], expected.state[floats.weight])
    module.float().to(memory_format=torch.contiguous_format)
    module.weight.grad = torch.ones_like(module.weight)
    again = FusedAdamW(module.parameters(), state_dtype="int8")
    again.load_state_dict(optimizer.state_dict())
    again.step()
    assert again.state[module.weight].keys() >= {*ENTRIES}
    assert again.state[module.weight]["step"] == 3


SHORT = [(7, 5), (9, 130), (40, 150), (9, 300), (5, 1031), (3, 64, 6), (5, 100), (2, 64)]


@pytest.mark.parametrize("shape", SHORT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_that_end_a_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """They have less than 64 elements. Their gradients are written back, and tracking changes no
    bit."""
    written, runs = [], []
    for state_dtype, track in ((None, ()), ("int8", ()), ("int8", ("norms",)), ("int8", True)):
        weights = params(dtype, shape)
        optimizer = FusedAdamW(
            weights, LR, max_grad_norm=1e-3, state_dtype=state_dtype, fp32_moments=(), track=track,
            write_back_gradients=True,
        )  # fmt: skip
        for step in range(2):
            weights[0].grad = gradients(*shape, seed=step, dtype=dtype)
            optimizer.step()
        assert weights[0].grad.float().norm() < 2e-3
        written.append(bits(weights[0].grad))
        runs.append([bits(t) for t in (weights[0], *optimizer.state[weights[0]].values())])
    assert written == [written[0]] * 4
    assert runs[1] == runs[2] == runs[3]
