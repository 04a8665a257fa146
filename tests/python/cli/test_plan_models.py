"""python -m torchopt_ext plan: which models it takes, and which settings fit a GPU."""

import json
import sys
from typing import get_args

import pytest
import torch

from torchopt_ext.cli import arguments, fits, tensors
from torchopt_ext.cli.fits import SETTINGS
from torchopt_ext.optim.estimate import SHARDINGS, estimate
from torchopt_ext.optim.options import EmaDtype
from torchopt_ext.state.algorithms import ALGORITHMS, NAMES
from torchopt_ext.state.storage import DTYPE_NAMES, MASTER_WEIGHTS

BF16 = torch.bfloat16


def test_the_parsers_choices_are_those_of_the_package():
    """They are written out, so that --help does not wait for torch."""
    assert [*arguments.SHARDINGS] == [*SHARDINGS]
    assert arguments.ALGORITHMS == (*NAMES,)
    of_matrices = [name for name, of in NAMES.items() if ALGORITHMS[of].steps_matrices]
    assert [*arguments.OF_MATRICES] == of_matrices
    assert arguments.MASTERS == (*MASTER_WEIGHTS,)
    assert {*arguments.AVERAGES} <= {*get_args(get_args(EmaDtype)[1])}
    assert arguments.FLOATS == (*tensors.DTYPES,)
    assert {*arguments.MOMENTS} <= {*DTYPE_NAMES}
    assert {*fits.CLASSES} == {*NAMES}


# ---- models --------------------------------------------------------------------------------------


def test_plan_takes_a_number_in_place_of_a_file(run, fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = run("plan", "--params", "7B")
    assert "7,000,000,000 parameters" in expected
    for text in ("7B", "7e9", "7000M"):
        assert run("plan", text) == expected
    (tmp_path / "7B").write_text("hello, world")  # a file of this name comes first
    assert "7B is not a safetensors file" in fails("plan", "7B")
    for text in ("7BB", "gpt3", "0"):
        assert f"there is no file or folder {text}, and it is no number" in fails("plan", text)


def saved(path, names):
    from safetensors.torch import save_file

    save_file({name: torch.zeros(10, 3, dtype=BF16) for name in names}, path)


def test_plan_takes_a_folder_of_safetensors(run, fails, tmp_path):
    pytest.importorskip("safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "of nobody"}')  # headers come first
    saved(tmp_path / "model-1.safetensors", ["a", "b"])
    assert "60 parameters in 2 tensors, bfloat16" in run("plan", tmp_path)
    saved(tmp_path / "model-2.safetensors", ["c"])
    assert "has 2 models: name one of model-1.safetensors, model-2" in fails("plan", tmp_path)
    files = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert "90 parameters in 3 tensors, bfloat16" in run("plan", tmp_path)
    (tmp_path / "empty").mkdir()
    assert "has no model: expected *.safetensors" in fails("plan", tmp_path / "empty")


def test_plan_takes_what_transformers_describes(run, fails, tmp_path, monkeypatch, capsys):
    """The model has the weights of transformers' own, tied ones once, and its embeddings."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, dtype="bfloat16", architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    model = transformers.GPT2LMHeadModel(config).to(BF16)
    capsys.readouterr()  # what transformers says to this test
    for path in (tmp_path, tmp_path / "config.json"):
        args = ["plan", path, "--json", "--state-dtype", "int8", "--world-size", "1"]
        found = json.loads(run(*args))
        (rank,) = estimate(model.named_parameters(), state_dtype="int8")
        for name in ("weights", "gradients", "moments", "moved"):
            assert found["shardings"]["ddp"]["ranks"][0][name] == getattr(rank, name)
    found = json.loads(run("plan", tmp_path, "--algorithm", "muon", "--json"))
    assert found["algorithms"]["muon"]["tensors"] == 2 * 4
    for held, problem in (
        ('{"model_type": "of nobody"}', "transformers cannot build the model of"),
        ('{"weights": 3}', "is neither an index of safetensors files"),
        ("{", "cannot be read as JSON"),
    ):
        (tmp_path / "config.json").write_text(held)
        assert problem in fails("plan", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers, or name safetensors" in fails("plan", tmp_path)


# ---- what fits -----------------------------------------------------------------------------------


def params_of(count, dtype):
    return [param.to(dtype).requires_grad_() for param in tensors.alike(count)]


def fitting(run, *args):
    return json.loads(run("plan", *args, "--json"))


@pytest.mark.parametrize(("memory", "ranks"), [("24", 1), ("5", 4), ("1.5", 4)])
def test_what_fits_is_what_estimate_says(run, memory, ranks):
    """Each row has estimate's bytes, and none is left out that would fit.

    The order is by time, with rows last that leave less than a tenth of the memory.
    """
    found = fitting(run, "1B", "--gpu-memory", memory, "--world-size", ranks, "--bandwidth", "1000")
    most, times, rows = float(memory) * 1e9, [], set()
    assert found["gpu_memory"] == most
    for row in found["fits"]:
        setting, fraction = row["setting"], row["state_fraction"]
        rows.add((row["sharding"], *setting.values()))
        params = params_of(1_000_000_000, getattr(torch, setting["dtype"]))
        options = {"master_weights": setting["master_weights"], "world_size": ranks,
                   "state_dtype": setting["state_dtype"], "sharding": row["sharding"]}  # fmt: skip
        if fraction:
            options |= {"state_device": "cpu", "state_fraction": fraction}
        held = estimate(params, **options)
        on_gpu, on_host, moved, sent = (
            max(getattr(rank, name) for rank in held)
            for name in ("on_device", "host", "moved", "sent")
        )
        assert on_gpu <= most
        assert row["on_gpu"] == pytest.approx(on_gpu, rel=1e-6)
        assert row["on_host"] == pytest.approx(on_host, rel=1e-6)
        assert row["left"] == most - row["on_gpu"] >= 0
        assert (row["moved"], row["sent"]) == (moved, sent)
        is_tight = row["left"] < most / 10
        assert not is_tight or fraction == 1 or not fraction  # what could move there has moved
        time = max(moved / 1000e9, row["on_host"] / 50e9)
        times.append((is_tight, float(f"{time:.2e}"), sent))
    assert times == sorted(times)
    for setting in SETTINGS:
        dtype, masters, state, _ = setting
        for sharding in ["ddp"] if ranks == 1 else SHARDINGS:
            held = estimate(
                params_of(1_000_000_000, getattr(torch, dtype)), sharding=sharding,
                world_size=ranks, master_weights=masters, state_dtype=state, state_device="cpu",
            )  # fmt: skip
            least = max(rank.on_device for rank in held)
            assert ((sharding, *setting) in rows) == (least <= most)


def test_what_fits_keeps_to_what_is_given(run):
    args = ["1B", "--world-size", "1", "--gpu-memory", "24"]
    every = fitting(run, *args)["fits"]
    assert [row["setting"] for row in every] != []
    for option, value, key in (
        ("--dtype", "fp32", "dtype"),
        ("--master-weights", "remainder", "master_weights"),
        ("--state-dtype", "int8", "state_dtype"),
    ):
        name = {"fp32": "float32"}.get(value, value)
        expected = [row for row in every if row["setting"][key] == name]
        assert fitting(run, *args, option, value)["fits"] == expected
    given = ["--dtype", "fp16", "--master-weights", "fp32"]
    (row,) = fitting(run, *args, *given)["fits"]
    assert row["setting"]["dtype"] == "float16"
    found = fitting(run, *args[:2], "8", "--gpu-memory", "24", "--sharding", "zero2")["fits"]
    assert {row["sharding"] for row in found} == {"zero2"}
    (row,) = fitting(run, *args, *given, "--state-device", "cpu")["fits"]
    assert (row["state_fraction"], row["on_host"]) == (1.0, 12_000_000_000)
    (row,) = fitting(run, *args, *given, "--state-device", "cpu", "--host-memory", "12")["fits"]
    less = fitting(run, *args, *given, "--state-device", "cpu", "--host-memory", "11")
    assert (less["fits"], less["missing"]) == ([], 1_000_000_000)
    # 8-bit moments have no third moment of amsgrad.
    found = fitting(run, *args, "--amsgrad")["fits"]
    assert found and not any(row["setting"]["state_dtype"] == "int8" for row in found)


def test_what_leaves_little_memory_comes_last(run):
    args = ["1B", "--world-size", "1", "--gpu-memory", "4.6", "--host-memory", "5.5"]
    rows = fitting(run, *args)["fits"]
    assert [row["on_host"] / 1e9 for row in rows] == pytest.approx([3.0, 3.88, 5.46], rel=1e-3)
    assert [row["left"] >= 0.46e9 for row in rows] == [True, True, False]
    shown = run("plan", *args)
    assert "last, marked *, those that leave less than 10% of" in shown.replace("\n", " ")
    table = [line for line in shown.splitlines() if line.startswith("ddp ")]
    assert ["*" in line for line in table] == [False, False, True]


def test_what_fits_is_shown_with_its_python(run):
    shown = run("plan", "7B", "--gpu-memory", "24", "--sharding", "fsdp")
    assert "8 GPUs of 24.0 GB" in shown
    text = shown.replace("\n", " ")
    assert "FusedAdamW(params, master_weights='remainder8', state_dtype='int8') over bfl" in text
    assert "fsdp: fully_shard" in text
    shown = run("plan", "7B", "--gpu-memory", "24", "--sharding", "fsdp", "--ema-decay", "0.99")
    assert "state_dtype='int8', ema_decay=0.99)" in shown.replace("\n", " ")
    shown = run("plan", "1B", "--gpu-memory", "6", "--world-size", "1", "--dtype", "bf16")
    assert "state_device='cpu', state_fraction=" in shown.replace("\n", " ")
    assert "a link of 50 GB/s" in shown.replace("\n", " ")
    shown = run("plan", "7B", "--gpu-memory", "24", "--world-size", "1").replace("\n", " ")
    assert "Nothing fits: 4.00 GB are missing for each GPU, even with states in" in shown
    args = ["5B", "--world-size", "1", "--gpu-memory", "24", "--host-memory", "64", "--link", "25"]
    text = run("plan", *args)
    assert "step" in text and "state_device='cpu'" in text.replace("\n", " ")
    assert "in ms: mapped 564, staged 564. The" in text.replace("\n", " ")


def test_what_fits_takes_the_fastest_path(run):
    """5e9 bf16 parameters with fp32 masters: 80 GB, of which 0.98 of the states must leave."""
    args = ["5B", "--world-size", "1", "--gpu-memory", "24", "--link", "25", "--dtype", "bf16"]
    args += ["--master-weights", "fp32"]

    def one(*options):
        (row,) = fitting(run, *args, *options)["fits"]
        assert row["state_fraction"] == 0.98
        return row

    streamed, by_cpu = 0.98 * 60 / 25, 0.98 * 160 / 300
    row = one()
    assert (row["path"], row["on_host"]) == ("mapped", 58.8e9)
    assert row["offload_seconds"] == pytest.approx({"mapped": streamed, "staged": streamed})
    row = one("--host-bandwidth", "300")
    assert (row["path"], row["on_host"]) == ("host", pytest.approx(0.98 * 80e9))
    assert row["offload_seconds"]["host"] == pytest.approx(by_cpu)
    # Without room for the buffers of gradients and weights the GPU steps.
    row = one("--host-bandwidth", "300", "--host-memory", "64")
    assert (row["path"], "host" in row["offload_seconds"]) == ("mapped", False)
    shown = run("plan", *args, "--host-bandwidth", "300")
    assert "state_fraction=0.98, offload_step='host')" in " ".join(shown.split())
    (row,) = (line for line in shown.splitlines() if line.startswith("ddp "))
    assert row.split()[-1] == "host"
