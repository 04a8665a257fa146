"""python -m torchopt_ext inspect and convert."""

import copy
import hashlib
import json
import os
import pickle
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from torchopt_ext import FusedAdamW, FusedLion, FusedMuon, FusedSGD
from torchopt_ext.cli import convert
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.state.quantized import CODES, SCALES
from torchopt_ext.state.storage import join_master
from torchopt_ext.statedict.dcp import load

from ...support.compare import assert_same
from .conftest import stepped

BF16 = torch.bfloat16


def model_of(dtype=BF16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 5)).to(dtype)


def train(model, optimizer, steps=3, seed=1):
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 30).to(dtype)).square().mean().backward()
        optimizer.step()


def trained(**options):
    model = model_of()
    optimizer = FusedAdamW(model.named_parameters(), lr=1e-2, **options)
    train(model, optimizer)
    return model, optimizer


def loaded(path):
    return torch.load(path, weights_only=True)


@pytest.fixture
def inspect(run, tmp_path):
    """Returns a function that saves a state dict, and inspects it."""

    def call(saved, *options):
        path = saved
        if not hasattr(saved, "parts"):
            path = tmp_path / "inspected.pt"
            torch.save(saved, path)
        shown = run("inspect", path, *options)
        return json.loads(shown, parse_constant=pytest.fail) if "--json" in options else shown

    return call


# ---- inspect -------------------------------------------------------------------------------------


def test_inspect_what_lightning_saves_of_optimizers_with_and_without_state(inspect):
    """A Lightning .ckpt has a list of optimizers; plain SGD has no state, and shows its groups."""
    model, adam = trained()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    saved = {"epoch": 1, "state_dict": model.state_dict(), "lr_schedulers": []}
    saved["optimizer_states"] = [sgd.state_dict(), adam.state_dict()]
    shown = inspect(saved)
    assert "optimizer_states.0: optimizer state, 4 parameters by index, no state, no" in shown
    assert "group 0, 4 parameters: lr=0.5" in shown
    assert "optimizer_states.1: optimizer state, 4 parameters by index, step 3, no" in shown


def test_inspect_names_tensors_of_the_meta_device(inspect, fails, tmp_path):
    states = trained()[1].state_dict()
    states["state"][1]["exp_avg"] = states["state"][1]["exp_avg"].to("meta")
    states["state"][2]["step"] = states["state"][2]["step"].to("meta")
    shown = inspect(states, "--tensors")
    assert "4 parameters by index, step 3" in shown
    assert "on the meta device, without elements: state.1.exp_avg, state.2.step\n" in shown
    found = inspect(states, "--json")
    assert found["meta"] == ["state.1.exp_avg", "state.2.step"]
    missing = states["state"][1]["exp_avg"].nbytes
    sizes = {entry["kind"]: entry["bytes"] for entry in found["parts"][""]["entries"]}
    assert sizes["exp_avg"] == sizes["exp_avg_sq"] - missing
    problem = fails("convert", tmp_path / "inspected.pt", tmp_path / "new.pt", "--to-torch")
    assert "state.1.exp_avg is on the meta device, expected a dense tensor" in problem


def test_inspect_a_file(inspect):
    _, optimizer = trained(master_weights="remainder", state_dtype=BF16)
    optimizer.set_schedule(warmup_steps=2, stable_steps=3, decay_steps=4)
    states = optimizer.state_dict()
    found = inspect(states, "--json")
    part = found["parts"][""]
    assert (part["parameters"], part["masters"], part["steps"]) == (4, "remainder", [3])
    assert part["groups"][0]["options"]["lr"] == 1e-2
    kinds = {entry["kind"]: entry for entry in part["entries"]}
    assert kinds["exp_avg"] == {
        "kind": "exp_avg", "dtype": "bfloat16", "tensors": 4, "elements": 725, "bytes": 1450
    }  # fmt: skip
    assert kinds["remainder"]["dtype"] == "int16"
    tensors = {}
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
    text = inspect(states, "--tensors")
    assert "optimizer: optimizer state, 4 parameters by index, step 3, remainders" in text
    assert "\nstate.0.exp_avg " in text
    assert "sha256" not in inspect(states, "--no-hash")


def test_inspect_a_folder(inspect, tmp_path):
    model, optimizer = trained(master_weights="fp32")
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "dcp")
    found = inspect(tmp_path / "dcp", "--json")
    assert found["format"] == "distributed checkpoint"
    assert list(found["parts"]) == ["model", "optim"]
    assert found["parts"]["optim"]["masters"] == "fp32"
    assert not found["parts"]["model"]["optimizer"]
    saved = {"optim": optimizer.state_dict(), "model": model.state_dict()}
    assert inspect(saved, "--json")["sha256"] == found["sha256"]
    inspect(tmp_path / "dcp", "--tensors")


def test_inspect_others(inspect, tmp_path):
    """inspect reads torch's optimizers, containers' flat state dicts, and models alone."""
    model = model_of(torch.float32)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, sgd)
    part = inspect(sgd.state_dict(), "--json")["parts"][""]
    assert [entry["kind"] for entry in part["entries"]] == ["momentum_buffer"]
    sgd.param_groups[0]["lr"] = 0.0  # as at the end of a schedule
    assert "parameters: lr=0.0 momentum=0.9" in inspect(sgd.state_dict())
    container = OptimizersContainer([model], FusedAdamW, {"lr": 1e-3})
    train(model, container)
    dcp.save({"optimizer": container}, checkpoint_id=tmp_path / "flat")
    part = inspect(tmp_path / "flat", "--json")["parts"]["optimizer"]
    assert (part["layout"], part["parameters"], part["steps"]) == ("names", 4, [3])
    assert [group["parameters"] for group in part["groups"]] == [4]
    assert "weights" in inspect(model.state_dict())
    listed = nn.ParameterList([nn.Parameter(torch.ones(2))])
    container = OptimizersContainer([listed], FusedAdamW, {"lr": float("inf")})
    part = inspect({"optim": container.state_dict()}, "--json")["parts"]["optim"]
    assert (part["layout"], part["groups"][0]["options"]["lr"]) == ("names", "inf")


def normuon(named, **options):
    """Returns an optimizer of NorMuon for matrices and AdamW for the rest, in one object."""
    named = [*named]
    groups = [
        {"params": [(name, p) for name, p in named if p.dim() == 2], "algorithm": "normuon"},
        {"params": [(name, p) for name, p in named if p.dim() != 2], "algorithm": "adamw"},
    ]
    return FusedMuon(groups, adjust_lr_fn="match_rms_adamw", **options)


def test_inspect_shows_how_muon_steps(inspect):
    muon, adamw = inspect(stepped(long_rows(), normuon).state_dict()).split("group 1, ")
    for option in ("algorithm=normuon", "beta2=0.95", "ns_steps=5", "adjust_lr_fn=match_rms_adamw"):
        assert option in muon and option not in adamw


@pytest.mark.parametrize("step", [None, torch.tensor(float("nan")), 3, torch.tensor(3.0)])
def test_inspect_odd_values(inspect, step):
    shown = []
    for moment in (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])):
        entry = {"step": step, "exp_avg": moment}
        shown.append(inspect({"state": {0: entry}, "param_groups": [{"params": [0]}]}))
    assert ("step 3" if step in (3, torch.tensor(3.0)) else "no steps") in shown[0]
    assert shown[0].splitlines()[1:] == shown[1].splitlines()[1:]


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit(9)",)


class Forbidden:
    def __reduce__(self):
        return os.system, ("exit 9",)


def test_code_of_a_file_does_not_run(inspect, fails, tmp_path):
    """inspect names classes that it does not load; convert would lose their objects."""
    states = {"optimizer": trained()[1].state_dict(), "a": Evil()}
    shown = inspect(states)
    assert "not loaded, as their code could run: builtins.exec\n" in shown.replace(
        "__builtin__", "builtins"
    )
    assert "optimizer: optimizer state, 4 parameters by index, step 3" in shown
    found = fails("convert", tmp_path / "inspected.pt", tmp_path / "b.pt", "--to-torch")
    assert "exec, whose code could run" in found


def test_inspect_rejects(fails, tmp_path):
    for name, saved in {
        "whole": {"a": torch.zeros(1000)},
        "evil": {"a": Forbidden()},
        "list": [1],
        "sparse": {"a": torch.eye(2).to_sparse()},
    }.items():
        torch.save(saved, tmp_path / name)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "short").write_bytes((tmp_path / "whole").read_bytes()[:2000])
    (tmp_path / "folder").mkdir()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"junk")
    dcp.save({"a": torch.zeros(1000)}, checkpoint_id=tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "__0_0.distcp", 100)
    for name, problem in (
        ("gone", "there is no"),
        ("text", "begins with b'hell'"),
        ("short", "cannot be read"),
        ("evil", "refers to posix.system, whose code could run"),
        ("list", "holds list"),
        ("sparse", "torch.sparse_coo, expected a dense tensor"),
        ("folder", "lacks .metadata"),
        ("dcp", "is not a checkpoint's metadata"),
        ("cut", "cut is truncated: __0_0.distcp has 100 bytes, expected "),
        ("", f"is a folder of checkpoints: name one of them, such as {tmp_path}/cut"),
    ):
        assert problem in fails("inspect", tmp_path / name)


def test_an_incomplete_folder_is_rejected(fails, tmp_path):
    dcp.save({"optim": trained()[1]}, checkpoint_id=tmp_path / "a")
    metadata = dcp.FileSystemReader(tmp_path / "a").read_metadata()
    metadata.state_dict_metadata["optim.state.0.exp_avg"].size = torch.Size([40, 30])
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    for command in (["inspect", tmp_path / "a"], ["convert", tmp_path / "a", tmp_path / "b"]):
        found = fails(*command)
        assert "'optim.state.0.exp_avg' is incomplete: the checkpoint has 600 of its 1200" in found


# ---- convert -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["remainder", "remainder8"])
def test_convert_changes_masters_and_formats_without_loss(run, tmp_path, kind):
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
    for which, optimizer_of in ((model, optimizer), (other, masters)):
        train(which, optimizer_of, seed=2)
    assert_same(other.state_dict(), model.state_dict())


def test_remainders_by_name_are_int32(run, tmp_path):
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


def test_convert_to_torch_and_its_weights(run, tmp_path):
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
    kinds = {tuple(entry) for entry in states["state"].values()}
    assert kinds == {("step", "exp_avg", "exp_avg_sq")}
    model = model_of(torch.float32)
    model.load_state_dict(loaded(tmp_path / "fp32.pt"))
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    adamw.load_state_dict(states)
    for param, (ours, entry) in zip(model.parameters(), optimizer.state.items(), strict=True):
        assert torch.equal(param.detach(), entry["master_weight"])
        assert torch.equal(param.detach().to(BF16), ours.detach())
        assert torch.equal(adamw.state[param]["exp_avg"], entry["exp_avg"].float())
    torch.save(adamw.state_dict(), tmp_path / "adamw.pt")
    args = ["--master-weights", "remainder", "--weights", tmp_path / "fp32.pt"]
    run("convert", tmp_path / "adamw.pt", tmp_path / "back.pt", *args)
    back = loaded(tmp_path / "back.pt")["state"]
    for param, entry in zip(model.parameters(), back.values(), strict=True):
        exact = join_master(param.detach().to(BF16), entry["remainder"])
        ties = (param.detach().view(torch.int32) & 0x1FFFF) == 0x8000
        assert torch.equal(exact[~ties], param.detach()[~ties])


def long_rows():
    """Has rows of three groups and a rest, short rows, and channels-last memory."""
    torch.manual_seed(0)
    last = nn.Conv2d(8, 5, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Linear(200, 30), nn.Linear(30, 5), last)


def entries(saved):
    """Returns the state with each parameter's entries in one order."""
    return {index: dict(sorted(entry.items())) for index, entry in saved["state"].items()}


HELD = {"float32": None, "bfloat16": BF16, "int8": "int8"}


@pytest.mark.parametrize("format", ["torch", "dcp"])
@pytest.mark.parametrize("kept", [*HELD, "--to-torch"])
@pytest.mark.parametrize("saved", HELD)
@pytest.mark.parametrize("kind", [FusedAdamW, FusedLion, partial(FusedSGD, momentum=0.9), normuon])
def test_convert_8_bit_moments(run, tmp_path, kind, saved, kept, format):
    """convert writes what an optimizer with the other moments loads."""
    model = long_rows()
    optimizer = stepped(model, kind, state_dtype=HELD[saved])
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    option = [kept] if kept == "--to-torch" else ["--state-dtype", kept]
    run("convert", tmp_path / "a.pt", tmp_path / "b", *option, "--format", format)
    held = HELD.get(kept, torch.float32)
    other, taken = (kind(model.named_parameters(), lr=1e-2, state_dtype=held) for _ in range(2))
    other.load_state_dict(optimizer.state_dict())
    expected = entries(other.state_dict())
    if format == "torch":
        states = loaded(tmp_path / "b")["optimizer"]
        assert_same(entries(states), expected)
        taken.load_state_dict(states)
    else:
        load({"optimizer": taken}, checkpoint_id=tmp_path / "b")
    assert_same(entries(taken.state_dict()), expected)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_averages_of_rows_stay_fp32(run, tmp_path, dtype):
    optimizer = stepped(long_rows(), normuon)
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--state-dtype", dtype)
    name, states = "second_momentum_buffer", loaded(tmp_path / "b.pt")["state"]
    kept = {index: entry[name] for index, entry in states.items() if name in entry}
    before = optimizer.state_dict()["state"]
    assert_same(kept, {index: before[index][name] for index in kept})
    assert len(kept) == 2


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "kinds",
    [
        {"master_weights": "remainder8", "state_dtype": "int8"},
        {"master_weights": "fp32", "state_dtype": "bfloat16"},
    ],
)
def test_convert_a_whole_checkpoint(run, tmp_path, order, kinds):
    """A container converts by name, from a folder that does not record the memory order, and whose
    model completes the remainders."""
    model = long_rows().to(BF16, memory_format=order)
    options = {"lr": 1e-2, "master_weights": "remainder"}
    container = OptimizersContainer([model], FusedAdamW, options)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).to(BF16)
    container.step()
    dcp.save({"model": model, "optimizer": container}, checkpoint_id=tmp_path / "a")
    run("convert", tmp_path / "a", tmp_path / "b", "--state-dtype", kinds["state_dtype"],
        "--master-weights", kinds["master_weights"])  # fmt: skip
    kinds = kinds | {"state_dtype": HELD[kinds["state_dtype"]]}
    direct, taken = (OptimizersContainer([model], FusedAdamW, {"lr": 1e-2, **kinds}) for _ in "ab")
    load({"optimizer": direct}, checkpoint_id=tmp_path / "a")
    load({"optimizer": taken}, checkpoint_id=tmp_path / "b")
    for param in model.parameters():
        ours, expected = (one.optimizers[0].state[param] for one in (taken, direct))
        for name in {*CODES, *SCALES, "master_weight", "exp_avg"} & expected.keys():
            assert ours[name].equal(expected[name]), name


def test_convert_rejects_what_8_bits_do_not_go_with(fails, tmp_path):
    torch.save(stepped(long_rows(), amsgrad=True).state_dict(), tmp_path / "amsgrad.pt")
    states = stepped(long_rows(), state_dtype="int8").state_dict()
    states["state"][0]["exp_avg_scale_v0"] = states["state"][0].pop(next(iter(SCALES)))
    torch.save(states, tmp_path / "other.pt")
    for name, options, problem in (
        ("amsgrad", ["--state-dtype", "int8"], "state.0.max_exp_avg_sq belongs to amsgrad"),
        ("other", ["--to-torch", "--state-dtype", "int8"], "fp32 moments"),
        *(
            ("other", ["--state-dtype", kept], "exp_avg_codes is torch.int8 without scales")
            for kept in HELD
        ),
    ):
        command = ["convert", tmp_path / f"{name}.pt", tmp_path / "b.pt", *options]
        assert problem in fails(*command)
    assert not (tmp_path / "b.pt").exists()


def test_a_folder_is_written_one_tensor_at_a_time(run, tmp_path, monkeypatch):
    """DCP's writer keeps all tensors that it has written, so convert frees their memory."""
    _, optimizer = trained(master_weights="fp32")
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    made, held = [], []
    resolve = convert._Planner.resolve_data

    def noted(planner, item):
        made.append(resolve(planner, item))
        held.append(sum(t.untyped_storage().nbytes() for t in made if isinstance(t, Tensor)))
        return made[-1]

    monkeypatch.setattr(convert._Planner, "resolve_data", noted)
    run("convert", tmp_path / "a.pt", tmp_path / "b", "--format", "dcp")
    assert max(held) == 4 * 600  # the largest tensor


@pytest.mark.parametrize(("name", "format"), [("b.pt", "torch"), ("b", "dcp")])
def test_convert_replaces_only_when_told_to_and_whole(
    run, fails, inspect, tmp_path, monkeypatch, name, format
):
    torch.save(trained(master_weights="fp32")[1].state_dict(), tmp_path / "a.pt")
    output = tmp_path / name
    command = ["convert", tmp_path / "a.pt", output, "--format"]

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    run(*command, format)
    before = inspect(output, "--json")["sha256"]
    assert f"{output} exists; --force" in fails(*command, format)
    with monkeypatch.context() as patched:
        patched.setattr("torchopt_ext.cli.convert.save", fail)
        patched.setattr("torch.save", fail)
        problem = fails(*command, format, "--force", "--master-weights", "none")
        assert "No space left" in problem
    assert inspect(output, "--json")["sha256"] == before
    run(*command, format, "--force", "--master-weights", "none")
    assert inspect(output, "--json")["sha256"] != before
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", name}
    for other in ("torch", "dcp"):
        run(*command, other, "--force")
        assert output.is_dir() == (other == "dcp")
    (output / "notes").write_text("mine")
    assert "also has notes: not replaced" in fails(*command, format, "--force")
    assert (output / "notes").read_text() == "mine"


def test_convert_rejects_before_it_writes(fails, tmp_path):
    model, optimizer = trained(master_weights="remainder")
    nameless = FusedAdamW(model.parameters(), master_weights="remainder")
    adagrad = torch.optim.Adagrad(model.parameters())
    for each in (nameless, adagrad):
        train(model, each, 1)
    for name, saved in {
        "a.pt": optimizer, "model.pt": model, "fp32.pt": model_of(torch.float32),
        "nameless.pt": nameless, "adagrad.pt": adagrad,
    }.items():  # fmt: skip
        torch.save(saved.state_dict(), tmp_path / name)
    (tmp_path / "folder").mkdir()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    out, source, weights = (tmp_path / name for name in ("out", "a.pt", "model.pt"))
    to_fp32, missing = ["--master-weights", "fp32"], tmp_path / "gone" / "c.pt"
    for name, path, options, problem in (
        ("model.pt", out, [], "holds no optimizer's state"),
        ("adagrad.pt", out, to_fp32, "has no moments"),
        ("adagrad.pt", out, ["--state-dtype", "int8"], "has no moments"),
        ("a.pt", out, to_fp32, "no such weight: 0.weight"),
        ("a.pt", out, [*to_fp32, "--weights", tmp_path / "fp32.pt"], "expected bfloat16"),
        ("nameless.pt", out, to_fp32, "no param_names, by which weights would be found: give"),
        ("a.pt", out, ["--to-torch", *to_fp32], "--to-torch keeps no master"),
        ("a.pt", out, ["--save-weights", out.parent / "." / out.name], "both the output"),
        ("gone.pt", out, [], "there is no"),
        ("a.pt", missing, [], "there is no folder"),
        ("a.pt", out, ["--save-weights", missing], "there is no folder"),
        ("a.pt", "/proc/a.pt", [], "cannot write /proc/a.pt"),  # not writable for anybody
        ("a.pt", "/proc/a", ["--format", "dcp"], "cannot write /proc/a"),
        ("a.pt", source, [], "is the input"),
        ("a.pt", source, ["--force"], "is the input"),
        ("a.pt", weights, [*to_fp32, "--weights", weights, "--force"], "model.pt is --weights"),
    ):
        assert problem in fails("convert", tmp_path / name, path, *options)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
