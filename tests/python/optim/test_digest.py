"""torchopt_ext.digest is the sum that numerics.md defines, and finds what differs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchopt_ext import FusedAdamW, digest, log_to, mixed_precision
from torchopt_ext.zero import ZeroRedundancyOptimizer

from ...support.oracle import digest as expected_digest
from ...support.oracle import digest_array
from ...support.problems import make_params, set_gradients, train
from ...support.ways import WAYS, each_way

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.int16, torch.float16, torch.int32, torch.int64)


def stepped(way: str, shapes: Any = ((300,), (5, 70))) -> Any:
    params, optimizer = WAYS[way].build(shapes=shapes)
    train(optimizer, [0])
    return params, optimizer


def unsigned(digests: Tensor) -> list[int]:
    return [d % 2**64 for d in digests.tolist()]


def test_tensors() -> None:
    """Of any dtype, of complex values as pairs, of views that begin at odd elements."""
    words = torch.randint(256, (8 * 1999,), dtype=torch.uint8)
    tensors = [words.view(dtype)[1:].view(-1) for dtype in DTYPES]
    reals = [torch.randn(31, 2), torch.randn(600, 2, dtype=torch.float64)]
    tensors += [torch.view_as_complex(real) for real in reals]
    plain = [*tensors[: len(DTYPES)], *reals]
    assert unsigned(digest(tensors)) == [digest_array(t, i, 0) for i, t in enumerate(plain)]
    assert digest(iter(tensors)).equal(digest(tensors))
    assert digest([]).equal(torch.zeros(0, dtype=torch.int64))


@each_way
def test_any_flipped_bit_shows(way: str) -> None:
    """So do an exchange of two elements, and the parameter's number."""
    params, optimizer = stepped(way)
    whole = digest(optimizer)
    generator = random.Random(0)
    p, state = params[1], optimizer.state[params[1]]
    arrays = [value for key, value in state.items() if key != "step"]
    arrays += [] if "master_weight" in state else [p.detach()]
    for array in arrays:
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[array.itemsize]
        flat = array.view(-1).view(kind)
        width = 8 * array.itemsize
        for bit in range(width):
            element = generator.randrange(flat.numel())
            flipped = 1 << bit if bit < width - 1 else -(1 << bit)
            flat[element] ^= flipped
            assert digest(optimizer)[1] != whole[1]
            assert digest(optimizer)[0] == whole[0]
            flat[element] ^= flipped
        if flat[2] != flat[9]:
            flat[[2, 9]] = flat[[9, 2]]
            assert digest(optimizer)[1] != whole[1]
            flat[[2, 9]] = flat[[9, 2]]
    assert digest(optimizer).equal(whole)
    assert digest([torch.ones(3)] * 2).unique().numel() == 2


def test_parameters_without_state_have_a_digest_if_they_are_trained() -> None:
    params = make_params(((3,), (4,), (5,), (6,)))
    optimizer = FusedAdamW(params)
    params[3].requires_grad_(False)
    assert unsigned(digest(optimizer)) == [expected_digest(i, params[i], {}) for i in range(3)]
    set_gradients(params)
    params[1].grad = params[3].grad = None
    optimizer.step()
    assert unsigned(digest(optimizer)) == [
        expected_digest(i, params[i], optimizer.state.get(params[i], {})) for i in range(3)
    ]


def test_optimizers_inside_others() -> None:
    """torch's Adam, and the optimizer inside FSDPadaptOptimizer."""
    params, ours = stepped("fp32")
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(ours.state_dict())
    assert digest(theirs).equal(digest(ours))
    assert digest(mixed_precision.FSDPadaptOptimizer(ours)).equal(digest(ours))


@pytest.mark.parametrize("partition", ["greedy", "balanced"])
def test_parts_of_zero_add_up(partition: str) -> None:
    """Each rank's digests are of the elements that it holds, wherever they are in a parameter."""
    shapes = [(70, 65), (3,), (5, 4000)]
    whole = digest(FusedAdamW(make_params(shapes))).sum()
    parts = []
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            params = make_params(shapes)
            zero = ZeroRedundancyOptimizer(params, FusedAdamW, partition=partition)
            parts.append(digest(zero).sum())
        finally:
            dist.destroy_process_group()
    assert parts[0] + parts[1] == whole
    assert whole not in parts


def test_what_has_no_digest() -> None:
    params = make_params(((3,),))
    optimizer = torch.optim.Adagrad(params)
    set_gradients(params)
    optimizer.step()
    with pytest.raises(ValueError, match="'sum' of parameter 0 has no role"):
        digest(optimizer)
    with pytest.raises(
        TypeError, match=r"of is a Linear, expected .*, such as model.parameters\(\)"
    ):
        digest(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"item 1 is 1\.5, expected a tensor"):
        digest([params[0], 1.5])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match=r"tensor 1 .*meta"):
        digest([params[0], torch.ones(2, device="meta")])
    with pytest.raises(RuntimeError, match="got 7 numbers for 1 tensors, expected 8 for each"):
        torch.ops.torchopt_ext.digest_([params[0]], [0] * 7, torch.zeros(1, dtype=torch.int64))


def test_log() -> None:
    optimizer = FusedAdamW(make_params(dtype=torch.bfloat16))
    written: list[dict[str, float]] = []
    log_to(written.append, optimizer, every=2, first_step=3, digest_every=4, prefix="")
    actual = {}
    for step in range(4, 12):
        train(optimizer, [step])
        if step in (7, 11):
            actual[step] = sum(unsigned(digest(optimizer))) % 2**53
    assert {line["step"]: line["digest"] for line in written if "digest" in line} == actual
    assert [line["step"] for line in written] == [5, 7, 9, 11]
    for every in (3, 0):
        with pytest.raises(ValueError, match=rf"every: {every}, expected a multiple of"):
            log_to(written.append, optimizer, every=2, digest_every=every)
