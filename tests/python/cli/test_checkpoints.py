"""python -m torchopt_ext inspect and convert."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from torchopt_ext import FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.cli import convert
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.state.quantized import CODES, SCALES
from torchopt_ext.state.storage import join_master
from torchopt_ext.statedict.dcp import load

from .conftest import Run

BF16 = torch.bfloat16


def model_of(dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 5)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int = 3, seed: int = 1) -> None:
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 30).to(dtype)).square().mean().backward()
        optimizer.step()


def trained(**options: Any) -> tuple[nn.Sequential, FusedAdamW]:
    model = model_of()
    optimizer = FusedAdamW(model.named_parameters(), lr=1e-2, **options)
    train(model, optimizer)
    return model, optimizer


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


# ---- inspect -------------------------------------------------------------------------------------


def test_inspect_what_lightning_saves_of_optimizers_with_and_without_state(
    run: Run, tmp_path: Path
) -> None:
    """A Lightning .ckpt has a list of optimizers; plain SGD has no state, and shows its groups."""
    model, adam = trained()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    saved = {"epoch": 1, "state_dict": model.state_dict(), "lr_schedulers": []}
    saved["optimizer_states"] = [sgd.state_dict(), adam.state_dict()]
    torch.save(saved, tmp_path / "last.ckpt")
    shown = run("inspect", tmp_path / "last.ckpt")
    assert "optimizer_states.0: optimizer state, 4 parameters by index, no state, no" in shown
    assert "group 0, 4 parameters: lr=0.5" in shown
    assert "optimizer_states.1: optimizer state, 4 parameters by index, step 3, no" in shown


def test_inspect_names_tensors_of_the_meta_device(run: Run, fails: Run, tmp_path: Path) -> None:
    states = trained()[1].state_dict()
    states["state"][1]["exp_avg"] = states["state"][1]["exp_avg"].to("meta")
    states["state"][2]["step"] = states["state"][2]["step"].to("meta")
    torch.save(states, tmp_path / "meta.pt")
    shown = run("inspect", tmp_path / "meta.pt", "--tensors")
    assert "4 parameters by index, step 3" in shown
    assert "on the meta device, without elements: state.1.exp_avg, state.2.step\n" in shown
    found = json.loads(run("inspect", tmp_path / "meta.pt", "--json"))
    assert found["meta"] == ["state.1.exp_avg", "state.2.step"]
    missing = states["state"][1]["exp_avg"].nbytes
    sizes = {entry["kind"]: entry["bytes"] for entry in found["parts"][""]["entries"]}
    assert sizes["exp_avg"] == sizes["exp_avg_sq"] - missing
    problem = fails("convert", tmp_path / "meta.pt", tmp_path / "new.pt", "--to-torch")
    assert "state.1.exp_avg is on the meta device, expected a dense tensor" in problem


def test_inspect_a_file(run: Run, tmp_path: Path) -> None:
    _, optimizer = trained(master_weights="remainder", state_dtype=BF16)
    optimizer.set_schedule(warmup_steps=2, stable_steps=3, decay_steps=4)
    states = optimizer.state_dict()
    torch.save(states, tmp_path / "ours.pt")
    found = json.loads(run("inspect", tmp_path / "ours.pt", "--json"))
    part = found["parts"][""]
    assert part["parameters"] == 4
    assert part["masters"] == "remainder"
    assert part["steps"] == [3]
    assert part["groups"][0]["options"]["lr"] == 1e-2
    kinds = {entry["kind"]: entry for entry in part["entries"]}
    assert kinds["exp_avg"] == {
        "kind": "exp_avg", "dtype": "bfloat16", "tensors": 4, "elements": 725, "bytes": 1450
    }  # fmt: skip
    assert kinds["remainder"]["dtype"] == "int16"
    tensors: dict[str, Tensor] = {}
    for index, entry in states["state"].items():
        for name, value in entry.items():
            values = value.items() if isinstance(value, dict) else [("", value)]
            for inner, tensor in values:
                tensors[f"state.{index}.{name}.{inner}".rstrip(".")] = tensor
    hashed = hashlib.sha256()
    for key in sorted(tensors):
        value = tensors[key]
        hashed.update(f"{key} {str(value.dtype)[6:]} {list(value.shape)}\n".encode())
        hashed.update(bytes(value.reshape(-1).view(torch.uint8).tolist()))
    assert found["sha256"] == hashed.hexdigest()
    text = run("inspect", tmp_path / "ours.pt", "--tensors")
    assert "optimizer: optimizer state, 4 parameters by index, step 3, remainders" in text
    assert "\nstate.0.exp_avg " in text
    assert "sha256" not in run("inspect", tmp_path / "ours.pt", "--no-hash")


def test_inspect_a_folder(run: Run, tmp_path: Path) -> None:
    model, optimizer = trained(master_weights="fp32")
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "dcp")
    found = json.loads(run("inspect", tmp_path / "dcp", "--json"))
    assert found["format"] == "distributed checkpoint"
    assert list(found["parts"]) == ["model", "optim"]
    assert found["parts"]["optim"]["masters"] == "fp32"
    assert not found["parts"]["model"]["optimizer"]
    torch.save({"optim": optimizer.state_dict(), "model": model.state_dict()}, tmp_path / "file")
    assert json.loads(run("inspect", tmp_path / "file", "--json"))["sha256"] == found["sha256"]
    run("inspect", tmp_path / "dcp", "--tensors")


def test_inspect_others(run: Run, tmp_path: Path) -> None:
    """inspect reads torch's optimizers, containers' flat state dicts, and models alone."""
    model = model_of(torch.float32)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, sgd)
    torch.save(sgd.state_dict(), tmp_path / "sgd.pt")
    part = json.loads(run("inspect", tmp_path / "sgd.pt", "--json"))["parts"][""]
    assert [entry["kind"] for entry in part["entries"]] == ["momentum_buffer"]
    container = OptimizersContainer([model], FusedAdamW, {"lr": 1e-3})
    train(model, container)
    dcp.save({"optimizer": container}, checkpoint_id=tmp_path / "flat")
    part = json.loads(run("inspect", tmp_path / "flat", "--json"))["parts"]["optimizer"]
    assert (part["layout"], part["parameters"], part["steps"]) == ("names", 4, [3])
    assert [group["parameters"] for group in part["groups"]] == [4]
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert "weights" in run("inspect", tmp_path / "model.pt")
    sgd.param_groups[0]["lr"] = 0.0  # as at the end of a schedule
    torch.save(sgd.state_dict(), tmp_path / "ended.pt")
    assert "parameters: lr=0.0 momentum=0.9" in run("inspect", tmp_path / "ended.pt")
    listed = nn.ParameterList([nn.Parameter(torch.ones(2))])
    container = OptimizersContainer([listed], FusedAdamW, {"lr": float("inf")})
    container.step()
    torch.save({"optim": container.state_dict()}, tmp_path / "listed.pt")
    found = run("inspect", tmp_path / "listed.pt", "--json")
    part = json.loads(found, parse_constant=pytest.fail)["parts"]["optim"]
    assert (part["layout"], part["groups"][0]["options"]["lr"]) == ("names", "inf")


@pytest.mark.parametrize("step", [None, torch.tensor(float("nan")), 3, torch.tensor(3.0)])
def test_inspect_odd_values(run: Run, tmp_path: Path, step: Any) -> None:
    entry = {"step": step, "exp_avg": torch.tensor([1 + 2j]).conj()}
    torch.save({"state": {0: entry}, "param_groups": [{"params": [0]}]}, tmp_path / "a.pt")
    shown = run("inspect", tmp_path / "a.pt")
    assert ("step 3" if step in (3, torch.tensor(3.0)) else "no steps") in shown
    plain = {**entry, "exp_avg": torch.tensor([1 - 2j])}
    torch.save({"state": {0: plain}, "param_groups": [{"params": [0]}]}, tmp_path / "b.pt")
    assert run("inspect", tmp_path / "b.pt").splitlines()[1:] == shown.splitlines()[1:]


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit(9)",)


def test_inspect_rejects(fails: Run, tmp_path: Path) -> None:
    text, short, evil = tmp_path / "text", tmp_path / "short", tmp_path / "evil"
    text.write_text("hello")
    torch.save({"a": torch.zeros(1000)}, tmp_path / "whole")
    short.write_bytes((tmp_path / "whole").read_bytes()[:2000])
    torch.save({"a": Evil()}, evil)
    torch.save([1], tmp_path / "list")
    torch.save({"a": torch.eye(2).to_sparse()}, tmp_path / "sparse")
    torch.save({"a": torch.ones(2, device="meta")}, tmp_path / "meta")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"junk")
    dcp.save({"a": torch.zeros(1000)}, checkpoint_id=tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "__0_0.distcp", 100)
    for name, problem in (
        ("gone", "there is no"),
        ("text", "begins with b'hell'"),
        ("short", "cannot be read"),
        ("evil", "refers to exec, whose code could run"),
        ("list", "holds list"),
        ("sparse", "torch.sparse_coo, expected a dense tensor"),
        ("folder", "lacks .metadata"),
        ("dcp", "is not a checkpoint's metadata"),
        ("cut", "cut is truncated: __0_0.distcp has 100 bytes, expected "),
        ("", f"is a folder of checkpoints: name one of them, such as {tmp_path}/cut"),
    ):
        assert problem in fails("inspect", tmp_path / name)


# ---- convert -------------------------------------------------------------------------------------


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", ["remainder", "remainder8"])
def test_convert_changes_masters_and_formats_without_loss(
    run: Run, tmp_path: Path, kind: str
) -> None:
    """A file converts to a folder with fp32 masters and back; its state dict trains on alike."""
    model, optimizer = trained(master_weights=kind)
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    weights = ["--weights", tmp_path / "model.pt"]
    to_fp32 = ["--master-weights", "fp32", "--format", "dcp"]
    run("convert", tmp_path / "a.pt", tmp_path / "b", *to_fp32, *weights)
    back = ["--master-weights", kind, "--format", "torch"]
    run("convert", tmp_path / "b", tmp_path / "c.pt", *back)
    assert_same(loaded(tmp_path / "c.pt"), loaded(tmp_path / "a.pt"))
    run("convert", tmp_path / "b", tmp_path / "d.pt")  # .pt stands for --format torch
    states = loaded(tmp_path / "d.pt")
    for param, entry in zip(model.parameters(), states["state"].values(), strict=True):
        remainder = optimizer.state[param][kind]
        assert torch.equal(entry["master_weight"], join_master(param.detach(), remainder))
    other = copy.deepcopy(model)
    masters = FusedAdamW(other.named_parameters(), lr=1e-2, master_weights="fp32")
    masters.load_state_dict(states)
    for which, stepped in ((model, optimizer), (other, masters)):
        train(which, stepped, seed=2)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_remainders_by_name_are_int32(run: Run, tmp_path: Path) -> None:
    """torch scatters tensors of a dict by names, which neither gloo nor NCCL can for int16."""
    model, optimizer = trained(master_weights="fp32")
    torch.save(get_optimizer_state_dict(model, optimizer), tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--master-weights", "remainder")
    states = loaded(tmp_path / "b.pt")
    assert {entry["remainder"].dtype for entry in states["state"].values()} == {torch.int32}
    taken = FusedAdamW(model.named_parameters(), lr=1e-2, master_weights="remainder")
    taken.load_state_dict(states)
    for param, entry in optimizer.state.items():
        exact = join_master(param.detach(), taken.state[param]["remainder"])
        torch.testing.assert_close(exact, entry["master_weight"], rtol=2**-23, atol=0)


def test_convert_to_torch_and_its_weights(run: Run, tmp_path: Path) -> None:
    """torch's AdamW continues from the fp32 weights, and ours from its state dict, losslessly."""
    _, optimizer = trained(master_weights="fp32", state_dtype=BF16)
    optimizer.set_schedule(warmup_steps=2, stable_steps=3, decay_steps=4)
    torch.save(optimizer.state_dict(), tmp_path / "ours.pt")
    args = ["--to-torch", "--save-weights", tmp_path / "fp32.pt"]
    shown = run("convert", tmp_path / "ours.pt", tmp_path / "torch.pt", *args)
    assert "4 weights, float32" in shown and "low bits" not in shown
    for name, option in (("alone.pt", ["--to-torch"]), ("none.pt", ["--master-weights", "none"])):
        shown = run("convert", tmp_path / "ours.pt", tmp_path / name, *option)
        assert "without the low bits of 4 weights, which --save-weights writes" in shown
    states = loaded(tmp_path / "torch.pt")
    assert {tuple(entry) for entry in states["state"].values()} == {
        ("step", "exp_avg", "exp_avg_sq")
    }
    model = model_of(torch.float32)
    model.load_state_dict(loaded(tmp_path / "fp32.pt"))
    for param, (master, kept) in zip(
        model.parameters(), zip(optimizer.state, optimizer.state.values(), strict=True), strict=True
    ):
        assert torch.equal(param.detach(), kept["master_weight"])
        assert torch.equal(param.detach().to(BF16), master.detach())
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    adamw.load_state_dict(states)
    for param, entry in zip(model.parameters(), optimizer.state.values(), strict=True):
        assert torch.equal(adamw.state[param]["exp_avg"], entry["exp_avg"].float())
    torch.save(adamw.state_dict(), tmp_path / "adamw.pt")
    args = ["--master-weights", "remainder", "--weights", tmp_path / "fp32.pt"]
    run("convert", tmp_path / "adamw.pt", tmp_path / "back.pt", *args)
    for param, entry in zip(model.parameters(), loaded(tmp_path / "back.pt")["state"].values(),
                            strict=True):  # fmt: skip
        exact = join_master(param.detach().to(BF16), entry["remainder"])
        ties = (param.detach().view(torch.int32) & 0x1FFFF) == 0x8000
        assert torch.equal(exact[~ties], param.detach()[~ties])


def long_rows() -> nn.Sequential:
    """Has rows of three groups and a rest, short rows, and channels-last memory."""
    torch.manual_seed(0)
    last = nn.Conv2d(8, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return nn.Sequential(nn.Linear(200, 30), nn.Linear(30, 5), last)


def stepped(model: nn.Module, kind: Any = FusedAdamW, **options: Any) -> Any:
    optimizer = kind(model.named_parameters(), lr=1e-2, **options)
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.randn(param.shape)
        optimizer.step()
    return optimizer


HELD: dict[str, Any] = {"float32": None, "bfloat16": BF16, "int8": "int8"}


@pytest.mark.parametrize("format", ["torch", "dcp"])
@pytest.mark.parametrize("kept", HELD)
@pytest.mark.parametrize("saved", HELD)
@pytest.mark.parametrize("kind", [FusedAdamW, FusedLion, partial(FusedSGD, momentum=0.9)])
def test_convert_8_bit_moments(
    run: Run, tmp_path: Path, kind: Any, saved: str, kept: str, format: str
) -> None:
    """convert writes what an optimizer with the other moments loads."""
    model = long_rows()
    optimizer = stepped(model, kind, state_dtype=HELD[saved])
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b", "--state-dtype", kept, "--format", format)
    other, taken = (
        kind(model.named_parameters(), lr=1e-2, state_dtype=HELD[kept]) for _ in range(2)
    )
    other.load_state_dict(optimizer.state_dict())
    expected = other.state_dict()["state"]
    if format == "torch":
        states = loaded(tmp_path / "b")["optimizer"]
        assert_same(states["state"], expected)
        taken.load_state_dict(states)
    else:
        load({"optimizer": taken}, checkpoint_id=tmp_path / "b")
    assert_same(taken.state_dict()["state"], expected)


def test_convert_to_torch_decodes(run: Run, tmp_path: Path) -> None:
    model = long_rows()
    optimizer = stepped(model, state_dtype="int8")
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    assert f"{next(iter(SCALES))}" in run("inspect", tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to-torch")
    other = FusedAdamW(model.named_parameters(), lr=1e-2, state_dtype=torch.float32)
    other.load_state_dict(optimizer.state_dict())
    assert_same(loaded(tmp_path / "b.pt")["state"], other.state_dict()["state"])


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_convert_a_container_to_8_bits(run: Run, tmp_path: Path, order: Any) -> None:
    """A container converts by name, from a folder that does not record the memory order."""
    model = long_rows().to(BF16, memory_format=order)
    container = OptimizersContainer([model], FusedAdamW, {"lr": 1e-2, "master_weights": "fp32"})
    for param in model.parameters():
        param.grad = torch.randn(param.shape).to(BF16)
    container.step()
    dcp.save({"model": model, "optimizer": container}, checkpoint_id=tmp_path / "a")
    kinds = {"master_weights": "remainder8", "state_dtype": "int8"}
    run("convert", tmp_path / "a", tmp_path / "b", "--state-dtype", "int8",
        "--master-weights", "remainder8")  # fmt: skip
    direct, taken = (OptimizersContainer([model], FusedAdamW, {"lr": 1e-2, **kinds}) for _ in "ab")
    load({"optimizer": direct}, checkpoint_id=tmp_path / "a")
    load({"optimizer": taken}, checkpoint_id=tmp_path / "b")
    for param in model.parameters():
        ours, expected = (one.optimizers[0].state[param] for one in (taken, direct))
        for name in {*CODES, *SCALES} & expected.keys():
            assert ours[name].equal(expected[name]), name


def test_convert_rejects_what_8_bits_do_not_go_with(fails: Run, tmp_path: Path) -> None:
    torch.save(stepped(long_rows(), amsgrad=True).state_dict(), tmp_path / "amsgrad.pt")
    states = stepped(long_rows(), state_dtype="int8").state_dict()
    scale = next(iter(SCALES))
    states["state"][0]["exp_avg_scale_v0"] = states["state"][0].pop(scale)
    torch.save(states, tmp_path / "other.pt")

    def convert_(name: str, *args: str) -> str:
        return fails("convert", tmp_path / f"{name}.pt", tmp_path / "b.pt", *args)

    assert "state.0.max_exp_avg_sq belongs to amsgrad" in convert_(
        "amsgrad", "--state-dtype", "int8"
    )
    for kept in HELD:
        found = convert_("other", "--state-dtype", kept)
        assert "state.0.exp_avg_codes is torch.int8 without scales" in found
    assert "fp32 moments" in convert_("other", "--to-torch", "--state-dtype", "int8")
    assert not (tmp_path / "b.pt").exists()


def test_convert_a_whole_checkpoint(run: Run, tmp_path: Path) -> None:
    """The folder's model completes the remainders, and a container loads the result."""
    model = model_of()
    options = {"lr": 1e-2, "master_weights": "remainder"}
    container = OptimizersContainer([model], FusedAdamW, options)
    train(model, container)
    dcp.save({"model": model, "optimizer": container}, checkpoint_id=tmp_path / "a")
    run("convert", tmp_path / "a", tmp_path / "b", "--master-weights", "fp32",
        "--state-dtype", "bfloat16")  # fmt: skip
    other = copy.deepcopy(model)
    options = {"lr": 1e-2, "master_weights": "fp32", "state_dtype": BF16}
    taken = OptimizersContainer([other], FusedAdamW, options)
    load({"optimizer": taken}, checkpoint_id=tmp_path / "b")
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        state, kept = taken.optimizers[0].state[new], container.optimizers[0].state[old]
        assert torch.equal(state["master_weight"], join_master(old.detach(), kept["remainder"]))
        assert torch.equal(state["exp_avg"], kept["exp_avg"].to(BF16))


def test_a_folder_is_written_one_tensor_at_a_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP's writer keeps all tensors that it has written, so convert frees their memory."""
    _, optimizer = trained(master_weights="fp32")
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    made: list[Tensor] = []
    held: list[int] = []
    resolve = convert._Planner.resolve_data

    def noted(planner: Any, item: Any) -> Any:
        made.append(resolve(planner, item))
        held.append(sum(t.untyped_storage().nbytes() for t in made if isinstance(t, Tensor)))
        return made[-1]

    monkeypatch.setattr(convert._Planner, "resolve_data", noted)
    run("convert", tmp_path / "a.pt", tmp_path / "b", "--format", "dcp")
    assert max(held) == 4 * 600  # the largest tensor


def test_convert_replaces_only_when_told_to_and_whole(
    run: Run, fails: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = trained(master_weights="fp32")
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    for output, options in ((tmp_path / "b.pt", []), (tmp_path / "b", ["--format", "dcp"])):
        command = ["convert", tmp_path / "a.pt", output, *options]
        run(*command)
        before = json.loads(run("inspect", output, "--json"))["sha256"]
        assert f"{output} exists; --force" in fails(*command)
        with monkeypatch.context() as patched:

            def fail(*_: object, **__: object) -> None:
                raise OSError(28, "No space left on device")

            patched.setattr("torchopt_ext.cli.convert.save", fail)
            patched.setattr("torch.save", fail)
            assert "No space left" in fails(*command, "--force", "--master-weights", "none")
        assert json.loads(run("inspect", output, "--json"))["sha256"] == before
        run(*command, "--force", "--master-weights", "none")
        assert json.loads(run("inspect", output, "--json"))["sha256"] != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b", "b.pt"]
    for output, format_ in ((tmp_path / "b", "torch"), (tmp_path / "b.pt", "dcp")):
        run("convert", tmp_path / "a.pt", output, "--format", format_, "--force")
        assert output.is_dir() == (format_ == "dcp")
    (tmp_path / "b").unlink()
    (tmp_path / "b.pt").rename(tmp_path / "b")
    (tmp_path / "b" / "notes").write_text("mine")
    assert "also has notes: not replaced" in fails(*command, "--force")
    assert (tmp_path / "b" / "notes").read_text() == "mine"
    missing = tmp_path / "gone" / "c.pt"
    for args in ([missing], [tmp_path / "c.pt", "--save-weights", missing]):
        assert "there is no folder" in fails("convert", tmp_path / "a.pt", *args)
    for args in (["/proc/a.pt"], ["/proc/a", "--format", "dcp"]):  # not writable for anybody
        assert f"cannot write {args[0]}" in fails("convert", tmp_path / "a.pt", *args)
    for force in ([], ["--force"]):
        assert "is the input" in fails("convert", tmp_path / "a.pt", tmp_path / "a.pt", *force)
    weights = tmp_path / "weights.pt"
    torch.save({"x": torch.ones(2)}, weights)
    command = ("convert", tmp_path / "a.pt", weights, "--weights", weights, "--force")
    assert "weights.pt is --weights" in fails(*command, "--master-weights", "fp32")


def test_convert_rejects_before_it_writes(fails: Run, tmp_path: Path) -> None:
    model, optimizer = trained(master_weights="remainder")
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(model_of(torch.float32).state_dict(), tmp_path / "fp32.pt")
    nameless = FusedAdamW(model.parameters(), master_weights="remainder")
    train(model, nameless, 1)
    torch.save(nameless.state_dict(), tmp_path / "nameless.pt")
    sgd = torch.optim.Adagrad(model.parameters())
    train(model, sgd, 1)
    torch.save(sgd.state_dict(), tmp_path / "sgd.pt")
    out, to_fp32 = tmp_path / "out", ["--master-weights", "fp32"]
    for source, options, problem in (
        ("model.pt", [], "holds no optimizer's state"),
        ("sgd.pt", to_fp32, "has no moments"),
        ("sgd.pt", ["--state-dtype", "int8"], "has no moments"),
        ("a.pt", to_fp32, "no such weight: 0.weight"),
        ("a.pt", [*to_fp32, "--weights", tmp_path / "fp32.pt"], "expected bfloat16"),
        ("nameless.pt", [*to_fp32, "--weights", tmp_path / "model.pt"], "no param_names"),
        ("a.pt", ["--to-torch", *to_fp32], "--to-torch keeps no master"),
        ("a.pt", ["--save-weights", out.parent / "." / out.name], "both the output"),
        ("gone.pt", [], "there is no"),
    ):
        assert problem in fails("convert", tmp_path / source, out, *options)
    assert not out.exists()
