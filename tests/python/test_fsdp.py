"""Which models can keep low-precision shards, and what happens to the shards.
tests/distributed/fsdp_worker.py trains with two ranks."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchopt_ext import FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.containers import FTOptimizersContainer
from torchopt_ext.fsdp import keep_low_precision_shards

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def model_of(device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)).to(device, dtype)
    mesh = dist.init_device_mesh("cpu", (4,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **options)
    return model


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no trainable float32 parameter"),
        ({"mp_policy": BF16, "dtype": torch.bfloat16}, "no trainable float32 parameter"),
        ({"mp_policy": BF16, "device": "meta"}, "'0.weight' is on the meta device"),
        (
            {"mp_policy": BF16, "offload_policy": CPUOffloadPolicy(pin_memory=False)},
            "'0.weight' is offloaded by CPUOffloadPolicy",
        ),
        ({"mp_policy": BF16, "reshard_after_forward": 2}, "'0.weight' is resharded to a smaller"),
    ],
)
def test_models_without_them_are_rejected(options: dict[str, Any], message: str) -> None:
    model = model_of(**options)
    with pytest.raises(ValueError, match=message):
        keep_low_precision_shards(model)
    assert not any(vars(param._local_tensor) for param in model.parameters())


def test_an_unsharded_model_is_rejected() -> None:
    with pytest.raises(ValueError, match="expected fully_shard"):
        keep_low_precision_shards(nn.Linear(2, 2))


@pytest.mark.usefixtures("four_ranks")
def test_from_meta_to_memory() -> None:
    model = model_of("meta", mp_policy=BF16).to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 1 / 3)
    keep_low_precision_shards(model)
    for param in model.parameters():
        shard = param._local_tensor
        assert torch.equal(shard.low_precision_copy, shard.bfloat16())
        assert vars(pickle.loads(pickle.dumps(shard))) == {}


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("cls", [FusedAdamW, FusedLion, FusedSGD])
def test_a_step_writes_the_copies_and_a_dropped_model_leaves_no_shards(cls: Any) -> None:
    """A gather after a step copies nothing; only FSDP2's garbage cycles refer to shards."""
    model = model_of(mp_policy=BF16)
    keep_low_precision_shards(model)
    optimizer = cls(model.parameters())
    shards = [param._local_tensor for param in model.parameters()]
    for count in range(2):
        for param in model.parameters():
            param.grad = param.detach() + count
        optimizer.step()
        for shard in shards:
            assert torch.equal(shard.low_precision_copy, shard.bfloat16())
    for shard in shards:
        shard.low_precision_copy.data.fill_(7.0)  # counts no change, so that a gather sends it
        assert sent_by(shard).eq(7.0).all()
        shard.mul_(1.0)
        assert torch.equal(sent_by(shard), shard.bfloat16())
    references = [weakref.ref(x) for s in shards for x in (s, s.low_precision_copy)]
    del model, optimizer, param, shard, shards
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def sent_by(shard: Any) -> torch.Tensor:
    (sent,), _ = shard.fsdp_pre_all_gather(*[None] * 5)
    return sent[: len(shard)]


@pytest.mark.usefixtures("four_ranks")
def test_ranks_send_the_weights_that_local_sgd_writes() -> None:
    """torchft's LocalSGD and DiLoCo write weights through ``.data`` in a hook of the step."""
    pytest.importorskip("torchft")
    model = model_of(mp_policy=BF16)
    keep_low_precision_shards(model)
    manager: Any = None  # which decides on no step
    container = FTOptimizersContainer(
        [model], FusedAdamW, {"lr": 1e-2}, manager, use_ft_optimizer=False
    )
    shards = [param._local_tensor for param in model.parameters()]
    container.register_step_post_hook(lambda *_: [shard.data.fill_(3.0) for shard in shards])
    for param in model.parameters():
        param.grad = param.detach()
    container.step()
    for shard in shards:
        assert sent_by(shard).eq(3.0).all()
