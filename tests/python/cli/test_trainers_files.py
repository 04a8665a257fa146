"""inspect and convert on what trainers write: Hugging Face's, Lightning's and Accelerate's."""

import argparse
import json
import os
import pathlib

import pytest
import torch
from torch import nn

from torchopt_ext.cli.by_order import Unnamed, paired
from torchopt_ext.cli.terminal import CommandError

from ...support.compare import assert_same

safetensors = pytest.importorskip("safetensors.torch")


def block():
    return nn.ModuleDict({"fc": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})


def model_of():
    torch.manual_seed(0)
    return nn.ModuleDict({"emb": nn.Embedding(20, 8), "a": block(), "b": block()})


def trained(model, split=True):
    """Returns an optimizer without names, with the Trainer's two groups, after a step."""
    params = [*model.parameters()]
    groups = [[p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]]
    groups = [{"params": group} for group in groups] if split else params
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer


def masters(path):
    with torch.serialization.safe_globals([argparse.Namespace, pathlib.PosixPath]):
        saved = torch.load(path, weights_only=True)
    part = saved["optimizer_states"][0] if "optimizer_states" in saved else saved
    return [entry["master_weight"] for _, entry in sorted(part["state"].items())]


def in_order(optimizer):
    return [param.detach() for group in optimizer.param_groups for param in group["params"]]


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with a trained optimizer, as Accelerate names it, and its model."""
    model = model_of()
    optimizer = trained(model)
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "random_states_0.pkl").touch()
    return folder, model, optimizer


# ---- what is found -------------------------------------------------------------------------------


def test_inspect_says_what_it_found_in_a_folder(run, folder):
    folder, *_ = folder
    for path in (folder, folder / "optimizer.bin"):
        shown = run("inspect", path)
        assert "optimizer.bin: torch.save file" in shown
        assert "\na checkpoint of Accelerate\n" in shown
        assert "beside it: pytorch_model.bin, random_states_0.pkl" in shown
        assert "optimizer: optimizer state, 9 parameters by index, step 1" in shown
    (folder / "optimizer.bin").rename(folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text("{}")
    found = json.loads(run("inspect", folder, "--json"))
    assert found["made_by"] == "Hugging Face's Trainer"
    assert found["checkpoint"] == str(folder / "optimizer.pt")
    assert "trainer_state.json" in found["beside"]


def test_inspect_says_what_it_misses_in_a_folder(run, fails, folder):
    folder, *_ = folder
    (folder / "optimizer_1.bin").write_bytes((folder / "optimizer.bin").read_bytes())
    assert "has 2 optimizers: name one of optimizer.bin, optimizer_1" in fails("inspect", folder)
    assert f"name one of them, such as {folder}" in fails("inspect", folder.parent)
    for file in folder.glob("optimizer*"):
        file.unlink()
    assert "weights" in run("inspect", folder)  # of pytorch_model.bin
    (folder / "zero_to_fp32.py").touch()
    assert "is a checkpoint of DeepSpeed, whose shards" in fails("inspect", folder)


def test_inspect_reads_safetensors(run, fails, tmp_path):
    model = model_of().bfloat16()
    file = tmp_path / "model-1.safetensors"
    safetensors.save_file(model.state_dict(), file)
    found = json.loads(run("inspect", file, "--json"))
    assert (found["format"], found["elements"]) == ("safetensors", 20 * 8 + 2 * (64 + 3 * 8))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    same = json.loads(run("inspect", tmp_path / "model.pt", "--json"))
    for key in ("sha256", "tensors", "parts"):
        assert found[key] == same[key]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(model.state_dict(), file.name)}))
    assert json.loads(run("inspect", index, "--json"))["sha256"] == found["sha256"]
    assert "holds no optimizer's state" in fails("convert", file, tmp_path / "b.pt", "--to-torch")
    os.truncate(file, 20)
    assert "ends in its header" in fails("inspect", file)


def lightning(model, optimizer):
    hyper = {"args": argparse.Namespace(lr=1), "data": pathlib.PosixPath("data")}
    return {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"net.{name}": value for name, value in model.state_dict().items()},
        "optimizer_states": [optimizer.state_dict()],
        "hyper_parameters": hyper,
    }


def test_lightnings_file_has_its_weights(run, tmp_path):
    """Hyperparameters stay, and weights of the same file are paired."""
    model = model_of()
    optimizer = trained(model, split=False)
    torch.save(lightning(model, optimizer), tmp_path / "a.ckpt")
    assert "\na checkpoint of Lightning 2.6.6\n" in run("inspect", tmp_path / "a.ckpt")
    command = ["convert", tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--master-weights", "fp32"]
    shown = run(*command)
    assert "paired 9 parameters with weights by order and shape" in shown
    assert "from\n0 with net.emb.weight to 8 with net.b.norm.bias\n" in shown
    assert_same(masters(tmp_path / "b.ckpt"), in_order(optimizer))
    with torch.serialization.safe_globals([argparse.Namespace, pathlib.PosixPath]):
        assert torch.load(tmp_path / "b.ckpt")["hyper_parameters"]["args"].lr == 1


# ---- weights by order and shape ------------------------------------------------------------------


def test_a_state_without_names_gets_its_weights(run, folder, tmp_path):
    """A torch.save file keeps the model's order, also under two groups."""
    folder, model, optimizer = folder
    for weights in (folder, folder / "pytorch_model.bin"):
        options = ["--master-weights", "fp32", "--weights", weights, "--force"]
        run("convert", folder, tmp_path / "b.pt", *options)
        assert_same(masters(tmp_path / "b.pt"), in_order(optimizer))
    args = ["--to-torch", "--save-weights", tmp_path / "fp32.pt", "--weights", folder]
    run("convert", tmp_path / "b.pt", tmp_path / "c.pt", *args)
    found = torch.load(tmp_path / "fp32.pt")
    assert_same(dict(sorted(found.items())), dict(sorted(model.state_dict().items())))


def test_weights_are_written_as_safetensors(run, fails, folder, tmp_path):
    folder, model, _ = folder
    weights = ["--weights", folder]
    run("convert", folder, tmp_path / "b.pt", "--master-weights", "fp32", *weights)
    to_torch = ["--to-torch", "--save-weights", tmp_path / "fp32.safetensors", *weights]
    run("convert", tmp_path / "b.pt", tmp_path / "c.pt", *to_torch)
    found = safetensors.load_file(tmp_path / "fp32.safetensors")
    assert_same(dict(sorted(found.items())), dict(sorted(model.state_dict().items())))
    problem = fails("convert", tmp_path / "b.pt", tmp_path / "c.safetensors", "--to-torch")
    assert "c.safetensors: safetensors hold no param groups; name the output such as" in problem


def test_tied_weights_count_once(run, tmp_path):
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False))
    model[2].weight = model[0].weight
    optimizer = trained(model)
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    options = ["--master-weights", "fp32", "--weights", tmp_path / "model.pt"]
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", *options)
    assert_same(masters(tmp_path / "b.pt"), in_order(optimizer))


def test_what_is_not_clear_is_said(fails, folder, tmp_path):
    """safetensors have no order, and alone do not tell layers apart."""
    folder, model, _ = folder
    (folder / "pytorch_model.bin").unlink()
    safetensors.save_file(model.state_dict(), folder / "model.safetensors")
    command = ["convert", folder, tmp_path / "b.pt", "--master-weights", "fp32", "--weights"]
    found = fails(*command, folder)
    assert "the weights of 8 of 9 parameters are not clear" in found
    assert "parameters 1, 2 of shape [8, 8], which 2 weights have (a.fc.weight, b.fc" in found
    assert "no file tells the model's order, as config.json would" in found
    assert "model.named_parameters()" in found
    assert not (tmp_path / "b.pt").exists()


def test_transformers_tells_the_order(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 11, "n_head": 2, "vocab_size": 30, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, architectures=["GPT2LMHeadModel"])
    model = transformers.GPT2LMHeadModel(config)
    optimizer = trained(model)
    model.save_pretrained(tmp_path)  # with config.json; layers 10 and 2 are sorted as text
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text("{}")
    from torchopt_ext.__main__ import main

    out = tmp_path.parent / "b.pt"
    options = ["--master-weights", "fp32", "--weights", str(tmp_path), "--force"]
    assert main(["convert", str(tmp_path), str(out), *options]) == 0
    assert_same(masters(out), in_order(optimizer))


def unnamed(text):
    """Reads such as "a8 a8 b4": a group and a length for each parameter."""
    return [Unnamed(str(n), each[0], (int(each[1:]),)) for n, each in enumerate(text.split())]


@pytest.mark.parametrize(
    ("params", "weights", "ordered", "expected"),
    [
        ("a8 a4", "x8 y4", False, "x y"),
        ("a8 a4", "y4 x8", False, "x y"),
        ("a8 a8", "x8 y8", True, "x y"),
        ("a8 b8", "x8 y8", True, None),  # either group may have the first
        ("a8 a8", "x8 y8", False, None),
        ("a8", "x8 y8", True, None),
        ("a8 a8", "x8", True, None),
        ("a8", "x4", True, None),
        ("a8", "x8 y4", False, "x"),  # a buffer, or a weight without state
        ("a8 b4 b4", "x4 z8 y4", True, "z x y"),
    ],
)
def test_which_pairs_are_clear(params, weights, ordered, expected):
    there = [(each[0], (int(each[1:]),)) for each in weights.split()]
    if expected is None:
        with pytest.raises(CommandError, match="are not clear: parameters 0"):
            paired(unnamed(params), there, ordered)
    else:
        found = paired(unnamed(params), there, ordered)
        assert [found[str(n)] for n in range(len(found))] == expected.split()
