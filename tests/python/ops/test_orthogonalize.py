"""Orthogonalization has the specified bits, and fp64's singular values within rounding errors."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from exact_reference import from_bits, same_bits, to_bits
from muon_formulas import orthogonalized
from softfloat import FP32, decode, encode
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.profiler import ProfilerActivity, profile

import torchopt_ext
from torchopt_ext.state.newton_schulz import JORDAN, PRESETS, Triple, step_coefficients

from ...support.compare import assert_same
from .contract import WRONG, assert_compiles_to_one_graph, each_backend, rejected

orthogonalize = torchopt_ext.orthogonalize
operator = torch.ops.torchopt_ext.orthogonalize.default

each_preset = pytest.mark.parametrize("preset", PRESETS)
SHAPES = [(48, 48), (40, 90), (90, 40), (33, 300)]
# Ten steps multiply rounding errors by 3.4**8. The first polynomial of "cans" is near 0 at 0.85.
TOLERANCE = {"deepseek_v4": 5e-3, "cans": 2e-3}
BANDS = {
    "jordan": (0.68, 1.21),
    "quintic": (0.97, 1.15),
    "polar_express": (0.84, 1.13),
    "deepseek_v4": (0.999, 1.003),
    "cans": (0.83, 1.13),
}
"""Where each preset takes the singular values from 1/100 of the norm up."""


def random_matrix(m: int, n: int, singular_values: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    k = min(m, n)
    u, v = (torch.linalg.qr(torch.randn(size, k, dtype=torch.float64))[0] for size in (m, n))
    return (u * singular_values @ v.T).float()


def exactly(x: Tensor, triples: list[Triple], eps: float = 1e-7) -> Tensor:
    """Applies the polynomials to the singular values, in fp64."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / max(float(torch.linalg.vector_norm(s)), eps)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


def has_own_bf16_products() -> bool:
    """Whether this process orthogonalizes bfloat16 on the CPU without torch's products."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        orthogonalize(torch.ones(2, 2, dtype=torch.bfloat16))
    return not any(event.name == "aten::bmm" for event in profiled.events())


def distance(ours: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.matrix_norm(ours.double() - expected.double(), 2))


# --------------------------------------------------------------------------------------------
# Values.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_preset
def test_singular_values_are_those_of_the_polynomials(preset: str, shape: tuple[int, int]) -> None:
    k = min(shape)
    for power in range(7):
        x = random_matrix(*shape, torch.logspace(0, -power, k, dtype=torch.float64), power)
        expected = exactly(x, step_coefficients(preset))
        assert distance(orthogonalize(x, preset), expected) < TOLERANCE.get(preset, 1e-4)


@pytest.mark.parametrize("shape", [(12, 12), (12, 30), (30, 12)], ids=str)
@each_preset
def test_any_rank(preset: str, shape: tuple[int, int]) -> None:
    for rank in range(1, min(shape) + 1):
        values = torch.ones(min(shape), dtype=torch.float64)
        values[rank:] = 0
        x = random_matrix(*shape, values, rank)
        # A rank of 1 begins where derivatives are largest, at a singular value of 1.
        assert distance(orthogonalize(x, preset), exactly(x, step_coefficients(preset))) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_preset
def test_a_rank_of_1_stays_finite_in_16_bits(preset: str, dtype: torch.dtype) -> None:
    """Rounding takes its singular value above 1, where some polynomials lead to infinity."""
    torch.manual_seed(9)
    for m, n in ((1, 1), (1, 2), (1, 5), (2, 2), (4, 8)):
        x = (torch.randn(2000, m, 1) @ torch.randn(2000, 1, n)).to(dtype)
        ours = orthogonalize(x, preset).float()
        assert 0.6 < float(torch.linalg.matrix_norm(ours, 2).max()) < 1.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_preset
def test_no_singular_value_grows_in_16_bits(preset: str, dtype: torch.dtype) -> None:
    """Rounding may take one above the interval that a later polynomial is made for."""
    for shape in ((3, 4), (5, 40), (16, 16), (96, 32)):
        for seed in range(4):
            for condition in (3, 10, 30, 1000):
                values = torch.logspace(0, -math.log10(condition), min(shape), dtype=torch.float64)
                x = random_matrix(*shape, values, seed).to(dtype)
                ours = orthogonalize(x, preset).double()
                assert float(torch.linalg.matrix_norm(ours, 2)) < BANDS[preset][1] * 1.03


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_preset
def test_singular_values_end_in_the_presets_band(preset: str, shape: tuple[int, int]) -> None:
    k = min(shape)
    for power in (0.0, 0.5, 1.0):
        x = random_matrix(*shape, torch.logspace(0, -power, k, dtype=torch.float64), 7)
        s = torch.linalg.svdvals(x.double())
        assert float(s[-1] / torch.linalg.vector_norm(s)) > 0.01
        low, high = BANDS[preset]
        ours = torch.linalg.svdvals(orthogonalize(x, preset).double())
        assert low < float(ours.min())
        assert float(ours.max()) < high


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_near_torchs_function(shape: tuple[int, int]) -> None:
    x = random_matrix(*shape, torch.linspace(1, 0.1, min(shape), dtype=torch.float64))
    theirs = _zeropower_via_newtonschulz(x, JORDAN, 5, 1e-7)
    assert theirs.dtype == torch.bfloat16
    assert distance(orthogonalize(x), theirs) < 0.05
    assert distance(orthogonalize(x.bfloat16()), theirs) < 0.06
    assert distance(orthogonalize(x), exactly(x, [JORDAN] * 5)) < 1e-5


@pytest.mark.parametrize("shape", [(40, 70), (70, 40), (64, 768), (96, 96), (128, 512)], ids=str)
@pytest.mark.parametrize("condition", [1, 3, 10, 30, 100])
def test_bfloat16_is_as_exact_as_torchs(shape: tuple[int, int], condition: int) -> None:
    if not has_own_bf16_products():
        pytest.skip("the CPU has no instructions for products of bf16")
    values = torch.logspace(0, -math.log10(condition), min(shape), dtype=torch.float64)
    x = random_matrix(*shape, values).bfloat16()
    expected = exactly(x, [JORDAN] * 5)
    theirs = _zeropower_via_newtonschulz(x, JORDAN, 5, 1e-7).double()
    ours = orthogonalize(x)
    assert distance(ours, expected) < max(0.03, distance(theirs, expected))
    assert (ours - expected).norm() < (theirs - expected).norm()


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (128, 160)], ids=str)
def test_bfloat16_keeps_small_singular_values(shape: tuple[int, int]) -> None:
    """The steps enlarge them, with the errors that a rounded division by the norm would make."""
    if not has_own_bf16_products():
        pytest.skip("the CPU has no instructions for products of bf16")
    torch.manual_seed(4)
    x = torch.randn(shape[0], 4) @ torch.randn(4, shape[1]) + 0.01 * torch.randn(shape)
    x = x.bfloat16()
    expected = exactly(x, [JORDAN] * 5)
    theirs = _zeropower_via_newtonschulz(x, JORDAN, 5, 1e-7).double()
    assert (orthogonalize(x) - expected).norm() < 0.3 * (theirs - expected).norm()


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (1, 1000), (1000, 1)], ids=str)
@each_preset
def test_vectors(preset: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape)
    expected = exactly(x, step_coefficients(preset))
    assert distance(orthogonalize(x, preset), expected) < 1e-2
    assert distance(orthogonalize(x), exactly(x, [JORDAN] * 5)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_zero_matrices_stay_zero(dtype: torch.dtype) -> None:
    for eps in (1e-7, 0.0):
        assert_same(
            orthogonalize(torch.zeros(2, 3, 5, dtype=dtype), eps=eps),
            torch.zeros(2, 3, 5, dtype=dtype),
        )
    for shape in ((0, 3), (3, 0), (0, 2, 2)):
        assert orthogonalize(torch.zeros(shape, dtype=dtype)).shape == shape


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_nan_or_infinity_makes_its_matrix_nan(dtype: torch.dtype, value: float) -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 20, 30, dtype=dtype)
    clean = orthogonalize(x)
    x[1, 19, 3] = value
    ours = orthogonalize(x)
    assert ours[1].isnan().all()
    assert_same(ours[[0, 2]], clean[[0, 2]])
    if dtype == torch.float32:
        assert set(to_bits(ours[1].contiguous())) == {0x7FC00000}


@pytest.mark.parametrize("factor", [1e25, 1e-25, 2.0**126, 2.0**-130])
def test_norms_beyond_the_squares_of_fp32(factor: float) -> None:
    # Ones and twos, so that the factors change no digits.
    torch.manual_seed(3)
    x = torch.randint(1, 3, (20, 30)).float()
    scaled = (x.double() * factor).float()
    expected = exactly(scaled, [JORDAN] * 5, eps=0.0)
    assert distance(orthogonalize(scaled, eps=0.0), expected) < 1e-4
    wide = scaled.bfloat16()
    expected = exactly(wide, [JORDAN] * 5, eps=0.0)
    assert distance(orthogonalize(wide, eps=0.0), expected) < 0.05


def test_small_norms_are_divided_by_eps() -> None:
    x = random_matrix(6, 9, torch.ones(6, dtype=torch.float64)) * 1e-10
    for ours in (orthogonalize(x), orthogonalize(x.double()), orthogonalize(x, eps=1e-3)):
        assert float(torch.linalg.svdvals(ours.double())[0]) < 0.5  # no step brings it to 1
    assert distance(orthogonalize(x), exactly(x, [JORDAN] * 5)) < 1e-6
    assert distance(orthogonalize(x, eps=1e-9), exactly(x, [JORDAN] * 5, 1e-9)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_dtypes(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random_matrix(*shape, torch.linspace(1, 0.1, min(shape), dtype=torch.float64)).to(dtype)
    ours = orthogonalize(x, "polar_express")
    assert ours.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float16: 0.01, torch.bfloat16: 0.05}[dtype]
    assert distance(ours, exactly(x, step_coefficients("polar_express"))) < tolerance


def test_a_batch_takes_23_calls_of_torch() -> None:
    """docs/cuda.md: each is a launch on a GPU. The last copies the result."""
    for shape in ((1, 20, 30), (7, 30, 20)):
        x = torch.randn(shape).half()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            orthogonalize(x)
        ours = [e for e in profiled.events() if e.name == "torchopt_ext::orthogonalize"]
        called = Counter(e.name.removeprefix("aten::") for e in ours[-1].cpu_children)
        for name in ("detach", "empty", "empty_like", "mT", "reshape", "scalar_tensor", "view_as"):
            called.pop(name, None)  # without a launch
        assert called == {
            "linalg_vector_norm": 2, "clamp_min_": 1, "div": 3, "maximum": 1,
            "bmm": 5, "baddbmm": 10, "copy_": 1,
        }  # fmt: skip


# --------------------------------------------------------------------------------------------
# Bits.


@pytest.mark.parametrize(
    ("shape", "coefficients", "steps", "scale"),
    [
        ((4, 4), "jordan", 3, 1.0),
        ((3, 7), "jordan", 5, 1e25),
        ((1, 9), "polar_express", 4, 1.0),
        ((5, 6), "polar_express", 6, 1e-3),
        ((2, 3), "deepseek_v4", None, 1e-12),
        ((2, 5), [(1.5, -0.5, 0.0)] * 8, None, 1.0),
    ],
    ids=str,
)
def test_the_bits_are_those_of_exact_arithmetic_rounded(
    shape: tuple[int, int], coefficients: Any, steps: int | None, scale: float
) -> None:
    torch.manual_seed(4)
    x = torch.randn(shape) * scale
    rows = [[decode(FP32, bits) for bits in to_bits(row.clone())] for row in x]
    expected = orthogonalized(rows, step_coefficients(coefficients, steps), 1e-7)
    bits = [encode(FP32, value) for row in expected for value in row]
    ours = orthogonalize(x, coefficients, steps=steps)
    assert same_bits(ours, from_bits(torch.float32, bits).view(shape))


# More than a panel of k, a block of columns and a tile; a prime; all threads and one.
BIT_SHAPES = [(32, 32), (13, 500), (261, 261), (400, 270), (70, 1000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", BIT_SHAPES, ids=str)
def test_same_bits_in_batches_transposed_with_threads_and_gaps(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    if dtype == torch.bfloat16 and not has_own_bf16_products():
        pytest.skip("torch's products have bits of their own in a batch")
    torch.manual_seed(5)
    batch = (torch.randn(9, *shape) * torch.logspace(-9, 9, 9).view(9, 1, 1)).to(dtype)
    single = [orthogonalize(x, "polar_express") for x in batch]
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        for first, last in ((0, 9), (2, 4)):
            ours = orthogonalize(batch[first:last], "polar_express")
            assert all(map(same_bits, ours, single[first:last]))
        assert same_bits(orthogonalize(batch[3], "polar_express"), single[3])
        if shape[0] != shape[1]:
            turned = orthogonalize(batch[3].T, "polar_express")
            assert turned.is_contiguous()
            assert same_bits(turned.T.contiguous(), single[3])
    nested = orthogonalize(batch.view(3, 3, *shape), "polar_express")
    assert same_bits(nested.view_as(batch), torch.stack(single))


# --------------------------------------------------------------------------------------------
# Coefficients, and the operator's contract.


def test_presets_are_their_triples() -> None:
    torch.manual_seed(6)
    x = torch.randn(7, 9)
    for name, triples in PRESETS.items():
        assert_same(orthogonalize(x, name, steps=len(triples)), orthogonalize(x, list(triples)))
    assert_same(orthogonalize(x), orthogonalize(x, JORDAN))
    assert_same(orthogonalize(x), orthogonalize(x, [JORDAN] * 5))
    assert_same(orthogonalize(x, JORDAN, steps=3), orthogonalize(x, [JORDAN] * 3))
    assert_same(orthogonalize(x, steps=0), orthogonalize(x, []))
    assert step_coefficients("deepseek_v4") == [JORDAN] * 8 + [(2.0, -1.5, 0.5)] * 2
    assert step_coefficients("polar_express") == list(PRESETS["polar_express"][:5])
    assert step_coefficients("cans", 7)[4:] == [PRESETS["cans"][-1]] * 3
    assert step_coefficients([(1, 2, 3), [4, 5, 6]], 1) == [(1.0, 2.0, 3.0)]


@pytest.mark.parametrize(
    ("coefficients", "steps", "word"),
    [
        ("newton", None, "'newton'.*'polar_express'"),
        ((1.0, 2.0), None, r"\(1.0, 2.0\).*three"),
        ([(1.0, 2.0, 3.0), (1.0, 2.0)], None, r"\(1.0, 2.0\).*three"),
        ([JORDAN, 2.0], None, "2.0.*three"),
        ("jordan", -1, "-1"),
        ("jordan", 100, "100"),
        ([], 1, "no triple"),
        ((1.0, math.nan, 1.0), None, "nan.*finite"),
        ([JORDAN, (math.inf, 1.0, 1.0)], None, "inf.*finite"),
    ],
    ids=str,
)
def test_rejects_coefficients(coefficients: Any, steps: int | None, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        step_coefficients(coefficients, steps)


@pytest.mark.parametrize(
    ("coefficients", "steps", "message"),
    [
        (torch.ones(3), None, "coefficients is tensor.*name of a preset or numbers"),
        (None, None, "coefficients is None"),
        (JORDAN, 2.5, "steps is 2.5, expected an integer"),
        (JORDAN, "5", "steps is '5', expected an integer"),
    ],
    ids=str,
)
def test_rejects_coefficients_of_a_wrong_type(coefficients: Any, steps: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        orthogonalize(torch.ones(2, 3), coefficients, steps=steps)


@pytest.mark.parametrize("wrong", ["sparse", "complex", "integer"])
def test_rejects_a_bad_tensor(wrong: str) -> None:
    change, word = WRONG[wrong]
    x = change(torch.ones(3, 4))
    with rejected([x], "matrices", word):
        operator(x, JORDAN)


def test_rejects_bad_arguments() -> None:
    x = torch.ones(3, 4)
    with rejected([x], "two dimensions"):
        operator(x[0], JORDAN)
    with rejected([x], "4 coefficients"):
        operator(x, (1.0, 2.0, 3.0, 4.0))
    for eps in (-1.0, math.nan):
        with rejected([x], "eps"):
            operator(x, JORDAN, eps)


def test_the_input_stays_and_the_result_is_new() -> None:
    for x in (torch.ones(3, 4), torch.ones(4, 3).T, torch.ones(3, 4, dtype=torch.float64)):
        before, version = x.clone(), x._version
        ours = orthogonalize(x, steps=0)
        assert_same(x, before)
        assert x._version == version
        assert ours.data_ptr() != x.data_ptr()
        assert ours.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    for shape in ((3, 4), (2, 5, 3)):
        torch.library.opcheck(operator, (torch.randn(shape).to(dtype), JORDAN))


@each_backend
def test_compiles_to_one_graph(backend: str) -> None:
    def run(x: Tensor) -> Tensor:
        return orthogonalize(x * 2, "cans").sum(0)

    def make() -> tuple[Tensor]:
        torch.manual_seed(8)
        return (torch.randn(3, 4),)

    assert_compiles_to_one_graph(run, make, backend)
