"""Cases of test_torchtitan.py: what torchtitan's tests of its DistMuon assert, on gloo ranks.

DistMuon needs CUDA. Here FusedMuon steps its groups, with the placements and settings of
torchtitan's tests/unit_tests/flex_shard/test_dist_muon.py. Experts whose rows are cut are those of
its later versions: DistMuon of 0.3 rejects them. It also asserts that groups are frozen, which
ours are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import _muon
from torchtitan.components import optimizer as stock
from torchtitan.components.optimizer.utils import (
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)
from torchtitan.distributed.flex_shard import BlockShard, BucketConfig, ComputeLayout, Owned

from tests.distributed.muon_worker import ROWS, counted_bytes
from tests.support.ranks import full_tensor, gathered, run_cases
from torchopt_ext import FusedMuon
from torchopt_ext.integrations import torchtitan_0_3

LAYOUTS: dict[str, dict[str, Any]] = {
    "owned": {"dp_shard": Owned()},
    "blocks": {"dp_shard": BlockShard(0, 4)},
    "experts": {axis: Shard(0) for axis in ("dp_shard", "efsdp", "ep")},
}
SHAPES = {"owned": (4, 3), "blocks": (12, 3), "experts": (3, 4, 3)}  # matrices of 4 x 3
LR, DECAY = 0.03, 0.2
MUON = {"lr": LR, "weight_decay": DECAY, "momentum": 0.8, "nesterov": True, "ns_steps": 2}
WIDE = SimpleNamespace(**{**vars(torch), "bfloat16": torch.float64})
"""Stands in for ``torch`` in torch's Muon, whose products are of bfloat16."""


def build(values: Mapping[str, Tensor], place: Callable[[Tensor], Tensor], **options: Any) -> Any:
    """Returns a container of FusedMuon for a group of DistMuon, and its parameters."""
    layer = nn.ParameterDict({name: nn.Parameter(place(value)) for name, value in values.items()})
    layouts = {f"layers.0.{name}": ComputeLayout(LAYOUTS[name]) for name in values}
    factory = {"compute_sharding_by_fqn": layouts, "bucket_configs": (BucketConfig(("layers.*",)),)}
    group = stock.ParamGroupConfig(
        pattern=".*", optimizer_name="DistMuon", optimizer_kwargs=MUON | options
    )
    config = stock.OptimizersContainer.Config(
        param_groups=[group], optimizer_factory_kwargs_by_name={"DistMuon": factory}
    )
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    container = torchtitan_0_3.optimizers(config).build(model_parts=[model])
    assert [type(optimizer) for optimizer in container] == [FusedMuon]
    return container, layer


def placing(mesh: DeviceMesh, *placements: Placement) -> Callable[[Tensor], Tensor]:
    return partial(distribute_tensor, device_mesh=mesh, placements=placements, src_data_rank=None)


def matches_plain_muon_across_a_flat_checkpoint(dtype: torch.dtype) -> None:
    """Ranks hold rows of blocks. torch's own directions in bf16 are off by up to 0.03 here."""
    place = placing(init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)), ROWS)
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    plain = {n: [nn.Parameter(m.clone()) for m in v.view(-1, 4, 3)] for n, v in values.items()}
    reference = torch.optim.Muon(chain(*plain.values()), **MUON)
    container, params = build(values, place, orthogonalize_dtype=dtype)
    tolerance = 4e-2 if dtype is torch.bfloat16 else 2e-5
    for resumes in (False, True):
        if resumes:
            (optimizer,) = container
            saved = get_flat_optim_state_dict(optimizer)
            assert {f"state.layers.0.{name}.momentum_buffer" for name in SHAPES} <= saved.keys()
            assert saved.keys() <= container.state_dict().keys()
            values = {name: full_tensor(param) for name, param in params.items()}
            container, params = build(values, place, orthogonalize_dtype=dtype, ns_steps=3)
            (optimizer,) = container
            init_optim_state(optimizer)
            load_flat_optim_state_dict(optimizer, saved)  # with ns_steps
        for name, shape in SHAPES.items():
            gradient = torch.randn(shape, generator=generator)
            params[name].grad = place(gradient)
            for matrix, its in zip(plain[name], gradient.view(-1, 4, 3), strict=True):
                matrix.grad = its
        container.step()
        with mock.patch.object(_muon, "torch", WIDE):
            reference.step()
        for name, param in params.items():
            expected = torch.cat([m.detach() for m in plain[name]]).view(param.shape)
            torch.testing.assert_close(full_tensor(param), expected, rtol=0, atol=LR * tolerance)


def experts_stay_with_the_ranks_that_hold_them() -> None:
    """Where efsdp cuts rows of experts, ranks of equal ep exchange them. Whole ones stay."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    generator = torch.Generator().manual_seed(0)
    value, gradient = (torch.randn(3, 5, 3, generator=generator) for _ in range(2))
    directions: list[Tensor] = []

    def stand_in(batch: Tensor) -> Tensor:
        directions.extend(batch.clone())
        return batch * 0.5 + 0.25

    options = {"momentum": 0.0, "nesterov": False, "orthogonalize": stand_in}
    whole = (_StridedShard(0, split_factor=2), ROWS)
    for placements in ((Shard(1), ROWS), whole):
        place = placing(mesh, *placements)
        container, params = build({"experts": value}, place, **options)
        param = params["experts"]
        param.grad = place(gradient)
        directions.clear()
        with counted_bytes() as sent:
            container.step()
        assert any(gathered(sum(sent))) == (placements != whole)
        found = [n for n in range(3) for its in directions if torch.equal(its, gradient[n])]
        of_ranks = gathered((found, len(directions), mesh.get_local_rank("ep")))
        for experts, count, ep in of_ranks:
            assert len(experts) == count <= 1
            assert {*experts} <= ({2} if ep else {0, 1})
        assert sorted(chain(*(experts for experts, *_ in of_ranks))) == [0, 1, 2]
        expected = value * (1 - LR * DECAY) - LR * (5 / 3) ** 0.5 * (gradient * 0.5 + 0.25)
        torch.testing.assert_close(full_tensor(param), expected, rtol=0, atol=1e-6)
        assert param.placements == placements


def cases() -> dict[str, Callable[[], Any]]:
    plain = matches_plain_muon_across_a_flat_checkpoint
    return {
        "plain, fp32": partial(plain, torch.float32),
        "plain, bf16": partial(plain, torch.bfloat16),
        "experts": experts_stay_with_the_ranks_that_hold_them,
    }


if __name__ == "__main__":
    run_cases(cases)
