"""Where convert finds weights, and what it leaves unchanged."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from torchopt_ext import FusedAdamW
from torchopt_ext.cli.terminal import CommandError
from torchopt_ext.cli.weights import keys_of
from torchopt_ext.state.storage import join_master

from .conftest import Run

BF16 = torch.bfloat16
KINDS = {"master_weights": "remainder"}


def trained(model: nn.Module, named: Any = None, **options: Any) -> FusedAdamW:
    torch.manual_seed(1)
    optimizer = FusedAdamW(named or model.named_parameters(), lr=1e-2, **options)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).to(param.dtype)
    optimizer.step()
    return optimizer


def block(**inner: nn.Module) -> nn.Module:
    return nn.ModuleDict({"norm": nn.Linear(8, 8), **inner}).to(BF16)


def exact(model: nn.Module, optimizer: FusedAdamW) -> dict[str, Tensor]:
    return {
        name: join_master(param.detach(), optimizer.state[param]["remainder"])
        for name, param in model.named_parameters()
    }


def test_what_is_no_optimizer_state_stays_as_it_is(run: Run, tmp_path: Path) -> None:
    """Keys that are not strings, empty containers and classes stay: schedules need them."""
    model = block()
    weights = model.state_dict()
    states = {
        "optimizer": trained(model).state_dict(),
        "lr": {"milestones": Counter({2: 1, 4: 1}), "empty": {}, "by_epoch": {0: 1.5}},
        "rng": {0: torch.arange(3)},
        "list": [torch.ones(1), {}, (1, torch.ones(2)), []],
        "model": weights,
        5: None,
    }
    torch.save(states, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--state-dtype", "bf16")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert found["optimizer"]["state"][0]["exp_avg"].dtype == BF16
    assert found["optimizer"]["param_groups"] == states["optimizer"]["param_groups"]  # type: ignore[index]
    assert list(found) == list(states)
    for key in ("lr", "rng", "list", 5):
        assert repr(found[key]) == repr(states[key])
    assert type(found["model"]) is OrderedDict
    assert found["model"]._metadata == weights._metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["beside", "given"])
def test_weights_whose_names_end_alike(run: Run, tmp_path: Path, where: str) -> None:
    model = block(inner=block(), state=nn.Linear(4, 4))
    optimizer = trained(model, **KINDS)
    beside = {"model": model.state_dict()} if where == "beside" else {}
    torch.save({"optim": optimizer.state_dict(), **beside}, tmp_path / "a.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    options = [] if beside else ["--weights", tmp_path / "model.pt"]
    shown = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to-torch",
                "--save-weights", tmp_path / "fp32.pt", *options)  # fmt: skip
    assert ("took 6 weights such as model.norm.weight" in shown) == bool(beside)
    found = torch.load(tmp_path / "fp32.pt", weights_only=True)
    expected = exact(model, optimizer)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def test_a_given_checkpoint_comes_first_and_wrappers_do_not_count(run: Run, tmp_path: Path) -> None:
    model = block()
    compiled = torch.compile(model, backend="eager")
    optimizer = trained(model, compiled.named_parameters(), **KINDS)  # type: ignore[attr-defined]
    average = {name: value * 0.5 for name, value in model.state_dict().items()}
    torch.save({"optim": optimizer.state_dict(), "ema": average}, tmp_path / "a.pt")
    torch.save({"net": model.state_dict()}, tmp_path / "model.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--master-weights", "fp32",
        "--weights", tmp_path / "model.pt")  # fmt: skip
    found = torch.load(tmp_path / "b.pt", weights_only=True)["optim"]["state"]
    for entry, expected in zip(found.values(), exact(model, optimizer).values(), strict=True):
        assert entry["master_weight"].equal(expected)


def test_two_optimizers_keep_the_weights_of_both(run: Run, tmp_path: Path) -> None:
    models = {"g": block(), "d": block()}
    both = {part: trained(model, master_weights="fp32") for part, model in models.items()}
    torch.save({part: one.state_dict() for part, one in both.items()}, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to-torch",
        "--save-weights", tmp_path / "fp32.pt")  # fmt: skip
    found = torch.load(tmp_path / "fp32.pt", weights_only=True)
    for part, model in models.items():
        for name, param in model.named_parameters():
            assert found[part][name].equal(both[part].state[param]["master_weight"])
    run("convert", tmp_path / "b.pt", tmp_path / "c.pt", "--master-weights", "fp32",
        "--weights", tmp_path / "fp32.pt")  # fmt: skip
    back = torch.load(tmp_path / "c.pt", weights_only=True)
    assert back["d"]["state"][0]["master_weight"].equal(found["d"]["norm.weight"])


MISSING, SEVERAL = "no such weight", "several weights end in"


@pytest.mark.parametrize(
    ("names", "keys", "part", "expected"),
    [
        ("w", "m.w ema.w", "", SEVERAL),
        ("w", "w ema.w", "", "w"),
        ("w", "g.w d.w", "d", "d.w"),
        ("w b.w", "m.w m.b.w", "", "m.w m.b.w"),
        ("w v", "m.w ema.w ema.v", "", SEVERAL),
        ("w v", "m.w m.v ema.v", "", SEVERAL),
        ("w v", "w v ema.w ema.v", "", "w v"),
        ("w v", "m.w teacher.v", "", MISSING),
        ("w v", "m.w ema.v m.u", "", MISSING),
        ("module.w", "m.w", "", "m.w"),
        ("w", "m.module.w", "", "m.module.w"),
        ("module.w v", "module.w v", "", "module.w v"),
        ("a._orig_mod.w", "m.a.w", "", "m.a.w"),
        ("a.w", "m.a._checkpoint_wrapped_module.w", "", "m.a._checkpoint_wrapped_module.w"),
        ("w", "xw", "", MISSING),
    ],
)
def test_which_keys(names: str, keys: str, part: str, expected: str) -> None:
    if expected in (MISSING, SEVERAL):
        with pytest.raises(CommandError, match=expected):
            keys_of(names.split(), keys.split(), part)
    else:
        assert keys_of(names.split(), keys.split(), part) == expected.split()


def test_fp32_moments_stay_exact(run: Run, fails: Run, tmp_path: Path) -> None:
    model = nn.ModuleDict({"tok": nn.Embedding(9, 64), "head": nn.Linear(64, 9)})
    optimizer = trained(model, state_dtype=torch.float32)
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    command = ["convert", tmp_path / "a.pt", tmp_path / "b.pt", "--state-dtype", "int8"]
    run(*command, "--fp32-moments", "tok")
    states = torch.load(tmp_path / "b.pt", weights_only=True)["state"]
    assert states[0]["exp_avg_sq"].equal(optimizer.state[model["tok"].weight]["exp_avg_sq"])
    assert states[1]["exp_avg_codes"].dtype == torch.int8
    assert "embeddings" in run(*command, "--force")
    for chosen, problem in (("none", "no parameter has a name with 'none'"), ("(", "expression")):
        assert problem in fails(*command, "--force", "--fp32-moments", chosen)
    assert "exceptions" in fails(*command[:3], "--force", "--fp32-moments", "tok")


def test_an_incomplete_folder_is_rejected(fails: Run, tmp_path: Path) -> None:
    dcp.save({"optim": trained(block())}, checkpoint_id=tmp_path / "a")
    reader = dcp.FileSystemReader(tmp_path / "a")
    metadata = reader.read_metadata()
    stored: Any = metadata.state_dict_metadata["optim.state.0.exp_avg"]
    stored.size = torch.Size([16, 8])
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    for command in (["inspect"], ["convert"]):
        output = [tmp_path / "b"] * (command == ["convert"])
        found = fails(*command, tmp_path / "a", *output)
        assert "'optim.state.0.exp_avg' is incomplete: the checkpoint has 64 of its 128" in found
