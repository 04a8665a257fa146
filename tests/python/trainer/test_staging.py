"""Copies of states for asynchronous saves."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchopt_ext.trainer.checkpoint_writer import Staged
from torchopt_ext.zero.state_shard import StateShard


@pytest.mark.usefixtures("one_rank")
def test_a_copy_stays_as_the_state_was() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 4]))
    tensors: dict[str, Any] = {
        "view": whole.clone()[:, 1:3],
        "transposed": torch.nn.Parameter(whole.clone().t()),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 2),
        "placed": distribute_tensor(whole.clone(), init_device_mesh("cpu", (1,)), [Shard(0)]),
        "divided": StateShard((3, 4), [whole.clone()], [chunk]),
    }
    plain: dict[Any, Any] = {0: (0.9, 0.95), "list": [1, [None, "a"]], "bytes": b"\0"}
    own = collections.OrderedDict(a=[1])
    state = {"tensors": tensors, "plain": plain, "own": own}
    staged = Staged(state, pinned=False)
    expected = {key: getattr(t, "shards", [t])[0].detach().clone() for key, t in tensors.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            for part in getattr(tensor, "shards", [tensor]):
                part.add_(1)
    plain["list"][1].append(2)
    own["a"].append(2)

    staged.wait()
    found = staged.result()
    assert found["plain"] == {0: (0.9, 0.95), "list": [1, [None, "a"]], "bytes": b"\0"}
    assert found["own"] == collections.OrderedDict(a=[1])
    for key, copied in found["tensors"].items():
        part = getattr(copied, "shards", [copied])[0]
        assert torch.equal(part, expected[key]), key
        assert copied.stride() == tensors[key].stride() or key == "view"
        assert not copied.requires_grad
    assert isinstance(found["tensors"]["placed"], DTensor)
    assert found["tensors"]["placed"].placements == (Shard(0),)
    assert found["tensors"]["divided"].chunks == [chunk]
