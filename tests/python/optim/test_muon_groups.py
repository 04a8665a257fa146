"""muon_groups: which parameters Muon gets, by what they are in the model, and why."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchopt_ext import muon_groups
from torchopt_ext.optim.embeddings import embeddings_of, reject_embeddings
from torchopt_ext.optim.muon_routing import routes

VOCAB, WIDTH, HEADS = 16, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH, False) for n in ("wq", "wo")})
        self.output = nn.Sequential(nn.Linear(WIDTH, VOCAB), nn.GELU(), nn.Linear(VOCAB, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention["wo"](self.attention["wq"](self.norm(x)))
        return x + self.output(x)


class GPT(nn.Module):
    """A hidden layer has as many rows as the embedding, and is in a module called "output"."""

    def __init__(self, head: str = "lm_head", tied: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.head = head
        setattr(self, head, nn.Linear(WIDTH, VOCAB, bias=False))
        if tied:
            getattr(self, head).weight = self.tok.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.pos_embed[:, : tokens.shape[-1]]
        for layer in self.layers:
            x = layer(x)
        return getattr(self, self.head)(x * self.gate)


HIDDEN = {
    f"layers.{i}.{name}.weight"
    for i in range(2)
    for name in ("attention.wq", "attention.wo", "output.0", "output.2")
}


def by_algorithm(groups: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Returns the names of each algorithm's parameters; each parameter must be there once."""
    names: dict[str, list[str]] = {"muon": [], "adamw": []}
    for group in groups:
        names[group["algorithm"]] += [name for name, _ in group["params"]]
    every = [*names["muon"], *names["adamw"]]
    assert len(every) == len(set(every))
    return {algorithm: set(its) for algorithm, its in names.items()}


def muons(model: nn.Module, **arguments: Any) -> set[str]:
    """Returns the names of Muon's parameters. AdamW's must be the others that are trained."""
    names = by_algorithm(muon_groups(model, quiet=True, **arguments))
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert names["adamw"] == trained - names["muon"]
    return names["muon"]


def reasons(model: nn.Module, **arguments: Any) -> dict[str, str]:
    routed = routes([model], **arguments)
    return {name: routed[param].why for name, param in model.named_parameters()}


@pytest.mark.parametrize("head", ["lm_head", "output", "unembedding", "last"])
def test_untied_output_layers_go_to_adamw(head: str) -> None:
    model = GPT(head)
    assert muons(model) == HIDDEN
    why = reasons(model)[f"{head}.weight"]
    assert why == ("output layer: as many rows as tok.weight" if head == "last" else
                   f"output layer: in {head!r}")  # fmt: skip


def test_a_tied_head_is_an_embedding() -> None:
    model = GPT(tied=True)
    assert muons(model) == HIDDEN
    assert reasons(model)["tok.weight"] == "embedding, also lm_head.weight"
    model.pool = nn.Linear(WIDTH, WIDTH)  # the last matrix, but the head is known
    assert muons(model) == HIDDEN | {"pool.weight"}


def test_the_last_layer_of_a_sequence_is_an_output_layer() -> None:
    layers = [nn.Linear(3, 3) for _ in range(3)]
    assert muons(nn.Sequential(*layers)) == {"0.weight", "1.weight"}
    sequence = nn.ModuleDict({"net": nn.Sequential(*layers)})
    assert muons(sequence) == {"net.0.weight", "net.1.weight"}
    assert muons(nn.ModuleDict({"net": nn.ModuleList([sequence])})) == {
        f"net.0.net.{i}.weight" for i in range(3)
    }


def test_names_and_shapes_as_of_llama() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 20, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    with torch.device("meta"):
        models = transformers.LlamaForCausalLM(config), transformers.LlamaModel(config)
        classifier = transformers.LlamaForSequenceClassification(config)
    layers = [f"layers.{i}.self_attn.{c}_proj.weight" for c in "qkvo" for i in range(2)]
    layers += [f"layers.{i}.mlp.{c}_proj.weight" for c in ("gate", "up", "down") for i in range(2)]
    assert muons(models[0]) == muons(classifier) == {f"model.{name}" for name in layers}
    assert muons(models[1]) == set(layers)  # without an output layer
    assert reasons(classifier)["score.weight"] == "output layer: the model's last matrix"


def test_a_pipeline_stage_routes_as_the_whole_model() -> None:
    stage = GPT()
    del stage.tok, stage.lm_head, stage.layers[0]
    stage.layers = nn.ModuleDict({"1": stage.layers[0]})  # as torchtitan cuts them
    assert muons(stage) == {name for name in HIDDEN if name.startswith("layers.1")}


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("scale", (6, 1, 1), "vector"),  # ConvNeXt's LayerScale
        ("scale", (1, 6), "vector"),
        ("scale", (), "vector"),
        ("scale", (0, 6), "vector"),
        ("scale", (1, 6, 1, 1), "vector"),
        ("w1", (3, 6, 1), "vector"),
        ("cls_token", (1, 1, 6), "vector"),
        ("b_bias", (3, 6), "bias"),  # of experts
        ("pos_embed", (5, 6), "embedding by its name"),
        ("positional_embedding", (5, 6, 4), "embedding by its name"),
        ("query_tokens", (5, 6), "embedding by its name"),
        ("latent", (1, 5, 6), "embedding: one for the whole batch"),
        ("A_log", (5, 6), "logarithms by their name"),  # of Mamba and Jamba
        ("reposition", (5, 6), None),
        ("logit_weight", (5, 6), None),
        ("embedder", (5, 6), None),
        ("w1", (3, 6, 4), None),
        ("latents", (5, 6), None),
    ],
)
def test_shapes_and_names(name: str, shape: tuple[int, ...], why: str | None) -> None:
    model = nn.ParameterDict({name: torch.ones(shape), "weight": torch.ones(2, 3)})
    model = nn.ModuleDict({"0": nn.ModuleDict({"block": model})})  # no last matrix
    assert reasons(model)[f"0.block.{name}"] == (
        why or ("hidden matrix" if len(shape) == 2 else "stack of matrices")
    )


def test_norms_of_any_shape_and_complex_weights() -> None:
    complex_weight = nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))
    norm, filters = nn.LayerNorm((3, 4)), nn.ParameterDict({"filters": complex_weight})
    model = nn.ModuleDict({"norm": norm, "fourier": filters, "up": nn.Linear(3, 4)})
    model["head"] = nn.Linear(4, 2)
    assert muons(model) == {"up.weight"}
    assert reasons(model)["fourier.filters"] == "complex"
    assert reasons(model)["norm.weight"] == "norm"


def test_embeddings_of_other_packages_are_known_by_the_word() -> None:
    class VocabParallelEmbedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(VOCAB, WIDTH))

    class EmbeddingsProjector(VocabParallelEmbedding): ...

    model = nn.ModuleDict({"tok": VocabParallelEmbedding(), "project": EmbeddingsProjector()})
    model["bag"] = nn.EmbeddingBag(3, WIDTH)
    model["head"] = nn.Linear(WIDTH, VOCAB)
    assert muons(model) == {"project.weight"}
    assert reasons(model)["tok.weight"] == "embedding: in a VocabParallelEmbedding"


class ConvNet(nn.Module):
    """As in YOLO and ConvNeXt: kernels, a depthwise kernel, norms, LayerScale, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.gamma = nn.Parameter(torch.ones(8, 1, 1))
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.up = nn.ConvTranspose2d(8, 4, 2)
        self.audio = nn.Conv1d(4, 6, 3)
        self.video = nn.Conv3d(4, 6, 3)
        self.squeeze = nn.Conv2d(6, 1, 1)
        self.fc = nn.Linear(6, 3)


def test_kernels_are_flattened_to_matrices() -> None:
    groups = muon_groups(ConvNet(), quiet=True)
    flat = {name for group in groups if group.get("flatten") for name, _ in group["params"]}
    names = {"stem", "grouped", "up", "audio", "video"}
    assert flat == by_algorithm(groups)["muon"] == {f"{name}.weight" for name in names}
    assert {group["name"] for group in groups} == {"muon flatten", "adamw decay", "adamw no_decay"}
    assert "(ConvNet): 5 matrices with" in groups.report
    whys = reasons(ConvNet())
    assert whys["depthwise.weight"] == "depthwise convolution"
    assert whys["squeeze.weight"] == whys["gamma"] == "vector"
    assert whys["fc.weight"] == "output layer: the model's last matrix"


def test_heads_may_have_hidden_kernels_but_no_hidden_matrices() -> None:
    kernels = {"body": nn.Conv2d(3, 4, 3), "classifier": nn.Conv2d(4, 2, 1)}
    model = nn.ModuleDict({"trunk": nn.Conv2d(3, 3, 3), "decode_head": nn.ModuleDict(kernels)})
    assert muons(model) == {"trunk.weight", "decode_head.body.weight"}
    model = nn.ModuleDict({"multi_head": nn.Linear(3, 3), "body": nn.Linear(3, 3)})
    model["cls_head"] = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    assert muons(model) == {"multi_head.weight", "body.weight"}


def test_experts_are_stacks_of_matrices() -> None:
    experts = nn.ParameterDict({"w1": torch.ones(4, 3, 2), "w2": torch.ones(4, 2, 3)})
    router = nn.Linear(2, 4, bias=False)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleList([router, experts])])})
    groups = muon_groups(model, quiet=True)
    assert [group["name"] for group in groups] == ["muon"]
    assert "flatten" not in groups[0]
    assert "9 matrices with 56 elements go to Muon, 0 parameters" in groups.report


class Adapted(nn.Module):
    """The names of peft's LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, WIDTH, bias=False)})
        self.lora_embedding_A = nn.ParameterDict({"default": torch.ones(2, VOCAB)})
        self.lora_magnitude_vector = nn.ParameterDict({"default": torch.ones(WIDTH)})


def test_lora_a_goes_to_adamw() -> None:
    """Nerogar/OneTrainer#1314: a matrix of so extreme a shape became noise."""
    model = nn.ModuleDict({"layers": nn.ModuleList([Adapted()]), "lm_head": nn.Linear(8, VOCAB)})
    model["lm_head"].requires_grad_(False)
    assert muons(model) == {"layers.0.lora_B.default.weight"}
    whys = reasons(model)
    assert whys["layers.0.lora_A.default.weight"] == "lora_A"
    assert whys["layers.0.lora_embedding_A.default"] == "lora_embedding_A"
    assert muon_groups(model, quiet=True).report.splitlines()[0].endswith("4 are frozen")


def test_peft() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(GPT(), peft.LoraConfig(r=2, target_modules=["wq", "tok"]))
    prefix = "base_model.model"
    expected = {f"{prefix}.layers.{i}.attention.wq.lora_B.default.weight" for i in range(2)}
    assert muons(model) == expected


def test_frozen_parameters_are_left_out() -> None:
    model = GPT()
    model.layers[0].requires_grad_(False)
    assert muons(model) == {name for name in HIDDEN if name.startswith("layers.1")}
    with pytest.raises(ValueError, match="no parameter of GPT requires a gradient"):
        muon_groups(model.requires_grad_(False))


# ---- wrappers and shards: the route is that of the whole, unwrapped model ------------------------
@pytest.fixture
def last_of_eight_ranks() -> Iterator[None]:
    """Makes this process the last of eight ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("last_of_eight_ranks")
def test_shards_decide_nothing() -> None:
    """A matrix of 8 rows is one row on each rank, and the last of 6 has none of 5 rows."""
    model, conv = GPT(), ConvNet()
    mesh = dist.device_mesh.init_device_mesh("cpu", (8,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fully_shard(conv, mesh=mesh)
    local = model.layers[0].attention["wq"].weight
    assert isinstance(local, DTensor) and local.to_local().shape[0] == 1
    assert muons(model) == HIDDEN
    assert reasons(model) == reasons(GPT())
    assert reasons(conv) == reasons(ConvNet())


def emptied(model: nn.Module) -> nn.Module:
    """Leaves parameters as DeepSpeed's zero.Init does (partition_parameters.py)."""
    for param in model.parameters():
        param.ds_shape = param.shape  # type: ignore[attr-defined]
        param.data = torch.empty(0)
    return model


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "compile": (torch.compile, "_orig_mod."),
    "DDP": (DistributedDataParallel, "module."),
    "zero.Init": (emptied, ""),
    "meta": (lambda model: model.to("meta"), ""),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models_are_routed_as_plain_ones(wrapper: str) -> None:
    """deepspeedai/DeepSpeed#8438: under zero.Init all parameters went to AdamW, silently."""
    wrap, prefix = WRAPPERS[wrapper]
    for new in (GPT, ConvNet):
        plain, wrapped = new(), wrap(new())
        assert muons(wrapped) == {prefix + name for name in muons(plain)}
        whys = {prefix + name: why for name, why in reasons(plain).items()}
        assert reasons(wrapped) == whys
        groups = [muon_groups(model, quiet=True) for model in (plain, wrapped)]
        assert [g["name"] for g in groups[0]] == [g["name"] for g in groups[1]]
        for ours, others in zip(*groups, strict=True):  # of the same decay
            assert [prefix + name for name, _ in ours["params"]] == [n for n, _ in others["params"]]


# ---- patterns ------------------------------------------------------------------------------------
def test_patterns_decide_otherwise() -> None:
    model = GPT()
    names = muons(model, muon=("^lm_head", "pos_"), adamw=(r"layers\.1\.",))
    first = {name for name in HIDDEN if name.startswith("layers.0")}
    assert names == first | {"lm_head.weight", "pos_embed"}
    assert reasons(model, muon=["lm_head"])["lm_head.weight"] == "muon='lm_head'"
    assert muons(model, muon=("weight",), adamw=("tok",)) == HIDDEN | {"lm_head.weight"}
    conv = muon_groups(ConvNet(), muon=("depthwise",), quiet=True)[0]
    assert conv["flatten"] and "depthwise.weight" in dict(conv["params"])
    assert "depthwise.bias" not in dict(conv["params"])
    compiled = muon_groups(torch.compile(model), muon_options={"^layers": {"ns_steps": 4}})
    assert [group.get("ns_steps") for group in compiled] == [4, None, None]


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_for_muon_raises(tied: bool) -> None:
    message = "'tok.weight', the weight of an embedding"
    with pytest.raises(ValueError, match=message):
        muon_groups(GPT(tied=tied), muon=("lm_head" if tied else "tok",))
    model = GPT()
    model.tok.requires_grad_(False)
    assert muons(model, muon=("tok|pos",)) == HIDDEN | {"pos_embed"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"muon": ("lm_hed",)}, r"no parameter has a name with \['lm_hed'\].*'lm_head.weight'"),
        ({"adamw": ("wk",)}, r"no parameter has a name with \['wk'\].*'lm_head.weight'"),
        ({"muon": ("gate|bias",)}, r"matches no matrix that is trained, only \{'gate': 'vector'"),
        ({"adamw": ("(",)}, "is not a regular expression"),
        ({"muon_options": {"wk": {"num_heads": 2}}}, r"no parameter has a name with \['wk'\]"),
        (
            {"muon_options": {"tok|gate": {}}},
            "AdamW: {'gate': 'vector', 'tok.weight': 'embedding'}",
        ),
        ({"lr_multipliers": {"wq": 2.0}}, "needs lr="),
        ({"weight_decay": -1.0}, "Invalid weight_decay"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muon_groups(GPT(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"muon_options": {"wq": {"numheads": 2}}}, "muon_options .*'numheads'.* 'num_heads'"),
        ({"adamw_options": {"beta": (0.9, 0.95)}}, "adamw_options .*'beta'.* 'betas'"),
    ],
)
def test_a_misspelled_option_is_rejected(arguments: dict[str, Any], message: str) -> None:
    """A group takes any key, and the option would have no effect."""
    with pytest.raises(TypeError, match=message):
        muon_groups(GPT(), **arguments)
    own = muon_groups(GPT(), quiet=True, adamw_options={"mine": 3})
    assert [group.get("mine") for group in own] == [None, 3, 3]


@pytest.mark.parametrize("argument", ["muon", "adamw", "no_decay"])
def test_a_string_is_no_sequence_of_patterns(argument: str) -> None:
    with pytest.raises(TypeError, match=rf"{argument} is 'wq', expected a sequence"):
        muon_groups(GPT(), **{argument: "wq"})  # type: ignore[arg-type]


# ---- groups --------------------------------------------------------------------------------------
def test_learning_rates_decay_and_options() -> None:
    groups = muon_groups(
        GPT(), 0.3, lr=0.02, lr_multipliers={"tok|wo": 0.5},
        no_decay=("norm", "bias", "vector", r"1\.output\.0"),
        muon_options={"layers": {"momentum": 0.9}, "wq": {"num_heads": 2, "momentum": 0.8}},
        adamw_options={"lr": 0.001, "betas": (0.8, 0.9)}, quiet=True,
    )  # fmt: skip
    muon = {"algorithm": "muon", "weight_decay": 0.3, "lr": 0.02, "momentum": 0.9}
    adamw = {"algorithm": "adamw", "weight_decay": 0.3, "lr": 0.001, "betas": (0.8, 0.9)}
    assert {g.pop("name"): ({k: v for k, v in g.items() if k != "params"},
                            sorted(n for n, _ in g["params"])) for g in groups} == {
        "muon, layers, wq": (muon | {"num_heads": 2, "momentum": 0.8},
                             [f"layers.{i}.attention.wq.weight" for i in range(2)]),
        "muon, layers, lr * 0.5": (muon | {"lr": 0.01},
                                   [f"layers.{i}.attention.wo.weight" for i in range(2)]),
        "muon, layers": (muon, ["layers.0.output.0.weight", "layers.0.output.2.weight",
                                "layers.1.output.2.weight"]),
        "muon no_decay, layers": (muon | {"weight_decay": 0.0}, ["layers.1.output.0.weight"]),
        "adamw decay, lr * 0.5": (adamw | {"lr": 0.0005}, ["tok.weight"]),
        "adamw decay": (adamw, ["lm_head.weight", "pos_embed"]),
        "adamw no_decay": (adamw | {"weight_decay": 0.0}, sorted(
            ["gate"] + [f"layers.{i}.{n}" for i in range(2)
                        for n in ("norm.weight", "output.0.bias", "output.2.bias")])),
    }  # fmt: skip


def test_groups_without_options_have_few_keys_and_muons_come_first() -> None:
    groups = muon_groups(GPT(), quiet=True)
    assert [g["name"] for g in groups] == ["muon", "adamw decay", "adamw no_decay"]
    assert all(g.keys() == {"params", "algorithm", "name", "weight_decay"} for g in groups)
    shared = torch.tensor(1.0)
    groups = muon_groups(GPT(), lr=shared, lr_multipliers={"gate": 3.0}, quiet=True)
    assert {float(group["lr"]) for group in groups} == {1.0, 3.0} and shared == 1.0


def test_the_rest_trains_in_torchs_optimizers() -> None:
    """torch has two classes: each takes its groups, with names, and its state dict stays plain."""
    groups = muon_groups(GPT(), lr=0.1, quiet=True)
    muon = [group for group in groups if group["algorithm"] == "muon"]
    adamw = [group for group in groups if group["algorithm"] == "adamw"]
    for optimizer in (torch.optim.Muon(muon), torch.optim.AdamW(adamw)):
        saved = optimizer.state_dict()["param_groups"]
        assert "report" not in {key for group in saved for key in group}
        assert copy.deepcopy(saved) == saved


# ---- the report ----------------------------------------------------------------------------------
def test_the_table_says_what_went_where_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    groups = muon_groups(GPT())
    assert capsys.readouterr().out == groups.report + "\n"
    head, *lines = groups.report.splitlines()
    assert head == (
        "muon_groups(GPT): 8 matrices with 768 elements go to Muon, 10 parameters with 368 to AdamW"
    )
    assert [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines] == [
        ["muon", "2 x (8, 8)", "layers.*.attention.wq.weight", "hidden matrix"],
        ["muon", "2 x (8, 8)", "layers.*.attention.wo.weight", "hidden matrix"],
        ["muon", "4 x 2 shapes", "layers.*.output.*.weight", "hidden matrix"],
        ["adamw decay", "1 x (1, 5, 8)", "pos_embed", "embedding by its name"],
        ["adamw decay", "1 x (16, 8)", "tok.weight", "embedding"],
        ["adamw decay", "1 x (16, 8)", "lm_head.weight", "output layer: in 'lm_head'"],
        ["adamw no_decay", "1 x (8,)", "gate", "vector"],
        ["adamw no_decay", "2 x (8,)", "layers.*.norm.weight", "norm"],
        ["adamw no_decay", "4 x 2 shapes", "layers.*.output.*.bias", "bias"],
    ]


def test_the_table_has_a_line_for_each_place_in_a_block() -> None:
    def mlp() -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in ("fc1", "fc2")})

    model = nn.ModuleDict({"h": nn.ModuleList([mlp(), mlp()]), "h1": mlp()})
    report = muon_groups(model, muon=("h",), quiet=True).report
    assert [line.split()[4:6] for line in report.splitlines()[1:]] == [
        ["3)", f"{name}.weight"] for name in ("h.*.fc1", "h.*.fc2", "h1.fc1", "h1.fc2")
    ]


def test_one_rank_prints_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    muon_groups(GPT(), quiet=True)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        assert muon_groups(GPT()).report.startswith("muon_groups(GPT): 8 matrices")
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().out == ""


# ---- embeddings in a group of Muon ---------------------------------------------------------------
@pytest.mark.parametrize("named", [True, False])
def test_a_group_with_an_embedding_is_rejected(named: bool) -> None:
    """As an optimizer does, which knows parameters, and names if it was given some."""
    model = GPT(tied=True)
    chosen = [
        ("layer", model.layers[0].attention["wq"].weight),
        ("lm_head.weight", model.lm_head.weight),
    ]
    group = {"params": [param for _, param in chosen]}
    if named:
        group["param_names"] = [name for name, _ in chosen]
    who = "'lm_head.weight'" if named else "parameter 1"
    with pytest.raises(
        ValueError, match=rf"{who} of shape \(16, 8\) is the weight of an embedding"
    ):
        reject_embeddings(group)
    reject_embeddings({"params": group["params"][:1]})


def test_embeddings_are_found_as_for_8_bit_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    bag, model = nn.EmbeddingBag(3, 4), GPT()
    known = embeddings_of(model.modules())
    monkeypatch.setattr(gc, "get_objects", lambda: [bag])
    reject_embeddings({"params": [model.tok.weight]})
    with pytest.raises(ValueError, match="parameter 0"):
        reject_embeddings({"params": [bag.weight]})
    with pytest.raises(ValueError, match="parameter 0"):
        reject_embeddings({"params": [model.tok.weight]}, known)
    reject_embeddings({"params": [bag.weight]}, known)


def test_what_muon_groups_returns_is_accepted() -> None:
    for group in muon_groups(GPT(), quiet=True):
        if group["algorithm"] == "muon":
            reject_embeddings({"params": [param for _, param in group["params"]]})
