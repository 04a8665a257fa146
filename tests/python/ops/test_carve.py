"""Tensors carved out of one memory block are ordinary tensors with their own storages."""

from __future__ import annotations

import copy
import io
import pickle
import random
import resource
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchopt_ext import _C


def shapes() -> list[Tensor]:
    return [
        torch.zeros(3, 5),
        torch.zeros(7, dtype=torch.bfloat16),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(4, 6, dtype=torch.float64).t(),
        torch.zeros(()),
        torch.zeros(0, 3),
        nn.Parameter(torch.zeros(1, 9)),
        torch.zeros(5, dtype=torch.complex64),
        torch.zeros(10, 4)[3:7],
    ]


def filled(tensors: list[Tensor]) -> list[Tensor]:
    for i, tensor in enumerate(tensors):
        tensor.fill_(i + 1)
    return tensors


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_layout(dtype: torch.dtype | None) -> None:
    like = shapes()
    carved = _C.carve(like, dtype)
    start = carved[0].data_ptr()
    for i, (tensor, x) in enumerate(zip(carved, like, strict=True)):
        assert type(tensor) is Tensor and not tensor.requires_grad and tensor.is_leaf
        assert tensor.dtype == (dtype or x.dtype)
        assert (tensor.shape, tensor.stride()) == (x.shape, x.stride())
        assert tensor.is_contiguous() == x.is_contiguous()
        assert (
            tensor.is_contiguous(memory_format=torch.channels_last) == (i == 2) or tensor.dim() < 4
        )
        assert tensor.storage_offset() == 0 and tensor._base is None
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if tensor.numel() > 0:
            assert tensor.data_ptr() == start
        start += -(-tensor.nbytes // 128) * 128
    filled(carved)
    assert all((tensor == i + 1).all() for i, tensor in enumerate(carved))


def test_nothing_is_dispatched() -> None:
    like = shapes()

    class Rejecting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, *_: Any) -> Any:
            raise AssertionError(func)

    with Rejecting():
        assert _C.carve([]) == []
        _C.carve(like)
        _C.carve(like, torch.float32, torch.device("cpu"))


def test_ordinary_tensors() -> None:
    weight, other = _C.carve([torch.empty(4, 3), torch.empty(3, 2)])
    weight.fill_(1.0)
    other.fill_(2.0)
    weight.requires_grad_()
    (weight @ other).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 3), 4.0))
    with torch.no_grad():
        version = weight._version
        weight.add_(1)
        assert weight._version == version + 1 and other._version == 1
    assert torch.equal(weight.detach().view(-1)[2:5], torch.full((3,), 2.0))
    assert weight.detach().numpy().sum() == 24.0
    assert nn.Parameter(other).data_ptr() == other.data_ptr()
    with torch.inference_mode():
        assert _C.carve([torch.empty(2)])[0].is_inference()


def test_one_version_for_all() -> None:
    like = shapes()
    apart, together = _C.carve(like), _C.carve(like, one_version=True)
    apart[0].zero_()
    together[0].zero_()
    assert [t._version for t in apart] == [1] + [0] * (len(like) - 1)
    assert [t._version for t in together] == [1] * len(like)
    with torch.inference_mode():
        assert all(t.is_inference() for t in _C.carve(like, one_version=True))


def test_resizing_is_rejected() -> None:
    (tensor,) = _C.carve([torch.empty(3)])
    for resize in (lambda: tensor.resize_(100), lambda: tensor.untyped_storage().resize_(0)):
        with pytest.raises(RuntimeError, match="resiz"):
            resize()
    assert tensor.resize_(2).shape == (2,)


def test_saving_writes_only_a_tensors_own_bytes() -> None:
    like = [torch.empty(100_000), torch.empty(10)]
    carved = filled(_C.carve(like))
    for make in (torch.save, pickle.dump):
        buffer = io.BytesIO()
        make(carved[1], buffer)
        assert buffer.tell() < 5000
    buffer = io.BytesIO()
    torch.save({"a": carved[0], "b": carved[1], "c": carved[1][2:4]}, buffer)
    assert buffer.tell() < 410_000
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert torch.equal(loaded["a"], carved[0]) and torch.equal(loaded["b"], carved[1])
    loaded["b"][2] = 7.0
    assert loaded["c"][0] == 7.0


def test_copies_have_memory_of_their_own() -> None:
    carved = filled(_C.carve([torch.empty(6, 2).t(), torch.empty(3)]))
    for copied in (copy.deepcopy(carved), pickle.loads(pickle.dumps(carved))):
        for a, b in zip(carved, copied, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
            assert a.data_ptr() != b.data_ptr()
            assert b.untyped_storage().nbytes() == b.nbytes
    first = carved[0].clone()
    carved[0].share_memory_()
    assert torch.equal(carved[0], first) and carved[0].is_shared() and not carved[1].is_shared()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_lives_as_long_as_its_tensors() -> None:
    """Memory stays valid and is freed, in whatever order the tensors die."""
    order = random.Random(1)
    like = [torch.empty(n) for n in (100_000, 1, 0, 50_000, 3000)]
    size = sum(tensor.nbytes for tensor in like)
    before = None
    for i in range(300):
        alive = dict(enumerate(filled(_C.carve(like))))
        order.shuffle(keys := list(alive))
        for key in keys:
            tensor = alive.pop(key)
            view = tensor.view(-1)[:1]
            del tensor
            assert (view == key + 1).all()
            assert all((x == k + 1).all() for k, x in alive.items())
        if i == 20:
            before = resident()
    assert before is not None and resident() - before < 20 * size


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError


REJECTED: dict[str, tuple[Any, str]] = {
    "gaps": (torch.zeros(4, 4)[:, ::2], "like 1 .*dense"),
    "expanded": (torch.zeros(1).expand(3), "like 1 .*dense"),
    "sparse": (torch.eye(3).to_sparse(), "like 1 .*dense"),
    "None": (None, "item 1 is no tensor"),
    "subclass": (Wrapper(), "like 1 is of a subclass"),
    "meta": (torch.zeros(3, device="meta"), "like 1 is on meta, expected cpu"),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_rejects(kind: str) -> None:
    wrong, message = REJECTED[kind]
    with pytest.raises((RuntimeError, TypeError), match=message):
        _C.carve([torch.empty(3), wrong, torch.empty(3)])


def test_rejects_quantized_dtypes_and_the_meta_device() -> None:
    with pytest.raises(TypeError, match="quantized"):
        _C.carve([torch.empty(3)], torch.qint8)
    with pytest.raises(RuntimeError, match=r"meta device.*pass a device"):
        _C.carve([torch.empty(3, device="meta")])


def test_shapes_may_be_on_another_device() -> None:
    like = [torch.empty(3, 2, device="meta"), torch.empty(4)]
    first, second = _C.carve(like, None, torch.device("cpu"))
    assert (first.device.type, first.shape, second.shape) == ("cpu", (3, 2), (4,))
