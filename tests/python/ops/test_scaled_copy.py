"""The scaled copy has the bits of single torch operations and of fractions, in any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact_reference import (
    DTYPES,
    format_of,
    from_bits,
    name_of,
    random_elements,
    same_bits,
    to_bits,
)
from softfloat import FORMATS, INF, NAN, Number, decode, encode, round_to
from torch import Tensor

from torchopt_ext import _C, ops

from ...support.oracle import canonical_nan
from .contract import WRONG, assert_compiles_to_one_graph, each_backend, rejected

PAIRS = [
    (to, source)
    for to in DTYPES
    for source in DTYPES
    if (to == torch.float64) == (source == torch.float64)
]
each_pair = pytest.mark.parametrize(
    ("to_dtype", "from_dtype"), PAIRS, ids=lambda dtype: name_of(dtype)
)


def control_of(factor: float = 1.0, *, skip: bool = False) -> Tensor:
    return ops.new_control(grad_factor=factor, skip=float(skip))


def copied(
    to_dtype: torch.dtype,
    source: Tensor,
    factor: float | None = None,
    control: Tensor | None = None,
) -> Tensor:
    to = torch.empty_like(source, dtype=to_dtype)
    if control is None:
        control = control_of(1.0 if factor is None else factor)
    ops.scaled_copy_([to], [source], control, unscale=factor is not None)
    return to


def expected(to_dtype: torch.dtype, source: Tensor, factor: float = 1.0) -> Tensor:
    """Returns the product, then the conversion, each correctly rounded by numpy."""
    compute = torch.float64 if source.dtype == torch.float64 else torch.float32
    wide = source.to(compute)  # exact
    with np.errstate(all="ignore"):
        rounded = wide.numpy() * wide.numpy().dtype.type(factor)
    product = torch.from_numpy(np.asarray(rounded))
    return canonical_nan(product.to(to_dtype))


def exactly(to_dtype: torch.dtype, element: Number, factor: float, compute: str) -> int:
    """Computes the same for one element, with fractions."""
    sign, magnitude = element
    if magnitude is NAN:
        return encode(format_of(to_dtype), (0, NAN))
    _, exact = decode(
        FORMATS[compute], to_bits(torch.tensor([factor], dtype=getattr(torch, compute)))[0]
    )
    if magnitude is not INF:
        magnitude = Fraction(magnitude) * exact
    product = round_to(FORMATS[compute], (sign, magnitude))
    return encode(format_of(to_dtype), round_to(format_of(to_dtype), product))


def edges(dtype: torch.dtype) -> Tensor:
    """Returns elements where a conversion to any type, or a product, rounds differently."""
    f = torch.finfo(dtype)
    values = [0.0, 1.0, f.tiny, f.smallest_normal, f.max, math.inf, math.nan, 1 + f.eps, 3.0]
    fp16 = [65504.0, 65519.0, 65520.0, 65536.0, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24]
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-133 * 1.5]
    near = [t + e for t in (1 + 2.0**-8, 1 + 2.0**-11) for e in (2.0**-23, -(2.0**-23))]
    both = torch.tensor([s * x for x in values + fp16 + ties + near for s in (1, -1)])
    width = format_of(dtype).width
    patterns = [1, 2, 3, (1 << (width - 1)) + 1, (1 << width) - 1, (1 << width - 1) - 1]
    exponent = to_bits(torch.tensor([math.inf], dtype=dtype))[0]
    patterns += [exponent + 1, exponent - 1]  # a signaling NaN, and the largest
    return torch.cat([both.double().to(dtype), from_bits(dtype, patterns)])


@each_pair
@pytest.mark.parametrize("factor", [None, 1.0, 0.3, 2.0**-16, 1e-30, 3.0, 1e30])
def test_edges_against_fractions(
    to_dtype: torch.dtype, from_dtype: torch.dtype, factor: float | None
) -> None:
    source = edges(from_dtype)
    compute = "float64" if from_dtype == torch.float64 else "float32"
    fmt = format_of(from_dtype)
    reference = [
        exactly(to_dtype, decode(fmt, b), 1.0 if factor is None else factor, compute)
        for b in to_bits(source)
    ]
    copies = to_bits(copied(to_dtype, source, factor))
    wrong = [
        f"{a:#x}: {b:#x} instead of {c:#x}"
        for a, b, c in zip(to_bits(source), copies, reference, strict=True)
        if b != c
    ]
    assert not wrong


@each_pair
@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1000, 100_003])
def test_many_elements(to_dtype: torch.dtype, from_dtype: torch.dtype, numel: int) -> None:
    source = random_elements(from_dtype, numel, numel, -30, 17, specials=True)
    assert same_bits(copied(to_dtype, source), expected(to_dtype, source))
    for factor in (0.37, 2.0**-7):
        assert same_bits(copied(to_dtype, source, factor), expected(to_dtype, source, factor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_all_16_bit_elements(dtype: torch.dtype) -> None:
    source = from_bits(dtype, range(1 << 16))
    for to_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for factor in (None, 0.3, 2.0**-10):
            copies = copied(to_dtype, source, factor)
            assert same_bits(copies, expected(to_dtype, source, 1.0 if factor is None else factor))


def test_the_factor_is_rounded_once_to_the_compute_type() -> None:
    factor = 1 + 2.0**-24 + 2.0**-40  # 1 + 2**-23 in float32
    source = random_elements(torch.float32, 100, 1)
    assert same_bits(copied(torch.float32, source, factor), source * torch.tensor(1 + 2.0**-23))
    doubles = source.double()
    assert same_bits(copied(torch.float64, doubles, factor), doubles * factor)


LAYOUTS = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "channels_last": lambda x: x.clone(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
    "negated": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("to_layout", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("from_layout", LAYOUTS)
def test_strides(to_layout: str, from_layout: str) -> None:
    values = random_elements(torch.bfloat16, 5 * 3 * 7 * 2, 4).view(5, 3, 7, 2)
    source = LAYOUTS[from_layout](values)
    to = LAYOUTS[to_layout](torch.zeros(5, 3, 7, 2))
    strides = to.stride()
    ops.scaled_copy_([torch.zeros(3), to], [torch.ones(3), source], control_of(0.3), unscale=True)
    assert to.stride() == strides
    reference = expected(torch.float32, source.contiguous().resolve_neg(), 0.3)
    assert same_bits(to.contiguous(), reference)


@pytest.mark.parametrize("unscale", [False, True])
def test_skip_writes_nothing(unscale: bool) -> None:
    to, in_place = torch.full((100,), 3.0), torch.full((5,), 7.0)
    sources = [torch.ones(100, dtype=torch.bfloat16), in_place]
    ops.scaled_copy_([to, in_place], sources, control_of(0.5, skip=True), unscale=unscale)
    assert (to == 3.0).all() and (in_place == 7.0).all()


def test_empty_lists_and_tensors() -> None:
    control = control_of(0.5)
    ops.scaled_copy_([], [], control, unscale=True)
    to = [torch.zeros(0), torch.zeros(3), torch.zeros(2, 0, 5), torch.zeros(())]
    sources = [x.bfloat16() + 1 for x in to]
    ops.scaled_copy_(to, sources, control, unscale=True)
    assert [x.flatten().tolist() for x in to] == [[], [0.5] * 3, [], [0.5]]
    narrow = torch.zeros(3, dtype=torch.bfloat16)
    ops.scaled_copy_([to[1], narrow], [sources[1]] * 2, control, unscale=False)  # for both
    assert to[1].tolist() == narrow.tolist() == [1.0] * 3


def lists_of_many(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Returns tensors of all type pairs, in sizes from one element to several chunks."""
    sizes = [1, 7, 1000, 4097, 70_001, 3, 0, 300_000]
    pairs = [(n, *pair) for n in sizes for pair in PAIRS]
    sources = [
        random_elements(source, n, seed + i, specials=True)
        for i, (n, _, source) in enumerate(pairs)
    ]
    return [torch.zeros(n, dtype=to) for n, to, _ in pairs], sources


def test_a_list_and_threads() -> None:
    copies = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        to, sources = lists_of_many(3)
        ops.scaled_copy_(to, sources, control_of(0.3), unscale=True)
        copies.append(to)
    for one, two, source in zip(*copies, sources, strict=True):
        assert same_bits(one, two)
        assert same_bits(one, expected(one.dtype, source, 0.3))


def test_without_the_dispatcher() -> None:
    (to, sources), (direct, same_sources) = lists_of_many(4), lists_of_many(4)
    control = control_of(0.3)
    ops.scaled_copy_(to, sources, control, unscale=True)
    _C.scaled_copy_(direct, same_sources, control, unscale=True)
    assert all(same_bits(a, b) for a, b in zip(to, direct, strict=True))
    assert [x._version for x in direct] == [x._version for x in to]
    with pytest.raises(RuntimeError, match=r"from 1 has shape \[1\], expected \[7\]"):
        _C.scaled_copy_(
            [direct[0], torch.ones(7)], [sources[0], torch.ones(1)], control, unscale=True
        )
    with pytest.raises(RuntimeError, match="to 0 is on the meta device"):
        _C.scaled_copy_([torch.ones(2, device="meta")], [torch.ones(2)], control, unscale=True)
    with pytest.raises(TypeError, match="item 1 is no tensor"):
        _C.scaled_copy_([direct[0], None], sources[:2], control, unscale=True)  # type: ignore[list-item]


# ---- rejections ----------------------------------------------------------------------------------


def assert_rejects(to: Sequence[Tensor], sources: Sequence[Tensor], *words: str) -> None:
    with rejected([*to, *sources], *words):
        ops.scaled_copy_(to, sources, control_of(0.5), unscale=True)


def lists() -> tuple[list[Tensor], list[Tensor]]:
    shapes = [(5,), (4, 6), (7,), (3,)]
    return [torch.zeros(s) for s in shapes], [torch.ones(s, dtype=torch.bfloat16) for s in shapes]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("role", ["to", "from"])
def test_rejects_a_bad_tensor(role: str, position: int, wrong: str) -> None:
    if role == "from" and wrong in ("gaps", "repeated"):
        pytest.skip("such a source is copied")
    to, sources = lists()
    change, word = WRONG[wrong]
    changed = to if role == "to" else sources
    changed[position] = change(changed[position])
    assert_rejects(to, sources, str(position), word)


def test_names_what_is_wrong() -> None:
    to, sources = lists()
    assert_rejects(to, [*sources[:3], sources[3][:2]], r"from 3 has shape \[2\], expected \[3\]")
    assert_rejects(to, sources[:2], "got 2 tensors in from for 4 in to")
    sources[2].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="from 2 has had its storage freed"):
        ops.scaled_copy_(to, sources, control_of(), unscale=True)


def test_rejects_shared_memory() -> None:
    room = torch.zeros(100)
    to, sources = [room[:10], room[10:20]], [torch.ones(10), torch.ones(10)]
    assert_rejects([to[0], room[5:15]], sources, "to 1 shares memory with to 0")
    assert_rejects(to, [to[1], torch.ones(10)], "to 1 shares memory with from 0")
    assert_rejects(to, [torch.ones(10), room[11:21]], "from 1 shares memory with to 1")
    narrow = room[:20].view(torch.bfloat16)[:10]
    assert_rejects(to, [torch.zeros(10, dtype=torch.bfloat16), narrow], "from 1", "to 0")
    square = torch.zeros(4, 4)
    assert_rejects([square], [square.t()], "from 0", "to 0")
    assert_rejects([room[90:]], [room[80:].view(10, 2)[:, 0]], "to 0", "from 0")


def test_the_same_memory_as_another_dtype_is_not_in_place() -> None:
    """The same address and size, but each element would be read as something else."""
    room = torch.arange(20).to(torch.float16)
    assert_rejects([room], [room.view(torch.bfloat16)], "to 0", "from 0")
    ops.scaled_copy_([room], [room], control_of(), unscale=True)


# ---- tracing -------------------------------------------------------------------------------------


def test_version_counters() -> None:
    to, sources = lists()
    to.append(torch.zeros(0))
    sources.append(torch.zeros(0))
    control = control_of(0.5)
    ops.scaled_copy_(to, sources, control, unscale=True)
    assert [x._version for x in to] == [1] * 5
    assert [x._version for x in [*sources, control]] == [0] * 6


@pytest.mark.parametrize("unscale", [False, True])
def test_opcheck(unscale: bool) -> None:
    operator = torch.ops.torchopt_ext.scaled_copy_.default
    for to, sources in (lists(), ([], [])):
        torch.library.opcheck(operator, (to, sources, control_of(0.5)), {"unscale": unscale})
    same = torch.ones(5)
    ops.scaled_copy_([same], [same], control_of(0.5), unscale=True)
    assert (same == 0.5).all()


@each_backend
def test_compile_traces_one_graph(backend: str) -> None:
    def run(to: list[Tensor], sources: list[Tensor], control: Tensor) -> Tensor:
        ops.scaled_copy_(to, [s * 2 for s in sources], control, unscale=True)
        ops.scaled_copy_(sources, to, control, unscale=False)
        return to[0] + 1

    assert_compiles_to_one_graph(run, lambda: (*lists(), control_of(0.3)), backend)


@torch.jit.script
def scripted(to: list[Tensor], sources: list[Tensor], control: Tensor) -> None:
    torch.ops.torchopt_ext.scaled_copy_(to, sources, control, unscale=True)


def test_torchscript() -> None:
    to, sources = lists()
    scripted(to, sources, control_of(0.5))
    assert all((x == 0.5).all() for x in to)
