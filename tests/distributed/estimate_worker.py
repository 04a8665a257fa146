"""Cases of test_workers.py: the estimates of optim/estimate.py equal what two ranks allocate."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.ranks import run_cases
from torchopt_ext import FusedAdamW, FusedMuon, muon_groups
from torchopt_ext.optim.estimate import SHARDINGS
from torchopt_ext.state.entries import MASTERS, MOMENTS
from torchopt_ext.state.quantized import CODES, SCALES
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

BUCKET, BF16 = 3000, torch.bfloat16


def build(dtype):
    """Returns a model with odd sizes, a tensor above a bucket, a frozen tensor, an embedding."""
    torch.manual_seed(0)
    linear = nn.Linear(70, 111), nn.Linear(111, 70), nn.Linear(70, 7)
    model = nn.Sequential(nn.Embedding(5, 70), *linear).to(dtype)
    model[2].bias.requires_grad_(False)
    return model


def given(model, kind):
    """Returns what the optimizer gets of a model: named parameters, or groups with all of them."""
    if kind is FusedAdamW:
        return model.named_parameters()
    frozen = [pair for pair in model.named_parameters() if not pair[1].requires_grad]
    return [*muon_groups(model, quiet=True), {"params": frozen, "algorithm": "adamw"}]


def shard(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def allocated(tensors):
    """Returns the bytes of the tensors' storages and counts a shared storage once."""
    storages = [shard(tensor).untyped_storage() for tensor in tensors if tensor is not None]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    sizes.pop(0, None)
    return sum(sizes.values())


def held(sharding, dtype=torch.float32, kind=FusedAdamW, **options):
    """A rank holds after a step what was estimated."""
    model = build(dtype)
    with torch.device("meta"):
        meta = build(dtype)
    is_cut = sharding in ("balanced", "zero2")
    ranks = kind.estimate(
        given(meta, kind),
        sharding=sharding,
        world_size=dist.get_world_size(),
        bucket_elements=BUCKET if is_cut else None,
        **options,
    )
    if sharding == "fsdp":
        fully_shard(model)
    params, options = list(model.parameters()), {"max_grad_norm": 1.0, **options}
    if sharding in ("ddp", "fsdp"):
        optimizer = local = kind(given(model, kind), **options)
    else:
        cut = {"partition": "balanced", "bucket_elements": BUCKET} if is_cut else {}
        cut["sharded_gradients"] = sharding == "zero2"
        optimizer = ZeroRedundancyOptimizer(given(model, kind), kind, **cut, **options)
        local = optimizer.optim
    run, buckets = model, []  # DDP keeps the buckets; the hook leaves no gradient in p.grad
    if sharding in ("ddp", "zero1", "balanced"):
        run = DDP(model, gradient_as_bucket_view=True)
    if sharding == "balanced":
        reduce_scatter = reduce_scatter_hook(optimizer)
        run.register_comm_hook(
            None, lambda _, bucket: buckets.append(bucket.buffer()) or reduce_scatter(_, bucket)
        )
    run(torch.randint(5, (5,))).square().mean().backward()
    optimizer.step()
    states = list(local.state.values())
    moments, masters = (
        [shard(state[name]) for state in states for name in names if name in state]
        for names in ((*MOMENTS, *CODES, *SCALES), MASTERS)
    )
    gradients = [*buckets, *(p.grad for p in params)]
    if is_cut:
        gradients += [p.grad for group in local.param_groups for p in group["params"]]
    estimated = ranks[dist.get_rank()]
    assert allocated(params) == estimated.weights
    assert allocated(gradients) == estimated.gradients
    assert sum(tensor.nbytes for tensor in masters) == estimated.masters
    assert sum(tensor.nbytes for tensor in moments) == estimated.moments
    # Small tensors' moments begin at multiples of 64 bytes. A cut one becomes up to three.
    assert 0 <= allocated(moments) - estimated.moments <= 64 * 2 * 21
    assert estimated.steps <= 4 * len(states) <= 3 * estimated.steps
    if sharding == "fsdp" or (is_cut and kind is FusedMuon):  # by owners
        return
    matrices = [
        sorted(p.shape)
        for group in local.param_groups
        for p in group["params"]
        if group.get("algorithm") == "muon"
    ]
    flops = sum(5 * short * short * (4 * long + 2 * short) for short, long in matrices)
    assert flops == estimated.newton_schulz_flops


def cases():
    made = {
        "zero2 remainder": partial(
            held, "zero2", BF16, master_weights="remainder", state_dtype=BF16
        )
    }
    eight_bits = {"master_weights": "remainder8", "state_dtype": "int8"}
    for sharding in SHARDINGS:
        made[sharding] = partial(held, sharding)
        made[f"{sharding} fp32"] = partial(held, sharding, BF16, master_weights="fp32")
        for name, chosen in {"": {}, " every matrix": {"fp32_moments": ()}}.items():
            if sharding in ("ddp", "zero1", "fsdp"):
                case = partial(held, sharding, BF16, **eight_bits, **chosen)
                made[f"{sharding} int8{name}"] = case
    for sharding in ("ddp", "zero1"):
        for name, chosen in {"": {}, " int8": eight_bits, " NorMuon": {"beta2": 0.9}}.items():
            case = partial(held, sharding, BF16, FusedMuon, **chosen)
            made[f"{sharding} Muon{name}"] = case
    for sharding in ("fsdp", "balanced", "zero2"):
        made[f"{sharding} NorMuon"] = partial(held, sharding, BF16, FusedMuon, beta2=0.9)
    return made


if __name__ == "__main__":
    run_cases(cases)
