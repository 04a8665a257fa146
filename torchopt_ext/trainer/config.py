"""JobConfig: everything that a training job can be told, in sections.

Sections, names and defaults are torchtitan's at 96c11f922; what torchtitan 0.2 added has its name
there. load_config.py reads the names that changed between torchtitan's versions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torchopt_ext.trainer.quantize_config import MX, Float8, Quantize


class ConfigError(ValueError):
    """A setting is unknown, ill-typed, out of range or not supported; the message names it."""


@contextmanager
def as_config_error() -> Iterator[None]:
    """Makes what a part of the package says of its arguments an error of the settings.

    Only around code that gets nothing but settings: of another error the traceback is needed.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(str(error)) from error


@dataclass
class Job:
    config_file: str | None = None
    """TOML file with the job's settings."""
    dump_folder: str = "./outputs"
    """Folder for everything that the job writes."""
    description: str = "default job"
    """What the log says the job is."""
    use_for_integration_test: bool = False
    """Accepted for torchtitan's files; nothing reads it."""
    print_args: bool = False
    """Log all settings at the start."""
    save_config_file: str | None = None
    """File in dump_folder to write all settings to, as JSON."""
    custom_config_module: str = ""
    """Module whose dataclass JobConfig adds sections and fields to this one."""


@dataclass
class Profiling:
    enable_profiling: bool = False
    """Record traces with torch.profiler."""
    save_traces_folder: str = "profile_traces"
    """Folder of traces in dump_folder."""
    profile_freq: int = 10
    """Steps from one trace to the next."""
    profiler_active: int = 1
    """Steps that a trace records."""
    profiler_warmup: int = 3
    """Steps that the profiler runs before it records."""
    enable_memory_snapshot: bool = False
    """Write snapshots of the GPU's allocator."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of snapshots in dump_folder."""


@dataclass
class Metrics:
    log_freq: int = 10
    """Steps from one line of metrics to the next."""
    enable_tensorboard: bool = False
    """Write metrics for TensorBoard."""
    disable_color_printing: bool = False
    """Print without colors, also on a terminal."""
    save_tb_folder: str = "tb"
    """Folder of TensorBoard's files in dump_folder."""
    save_for_all_ranks: bool = False
    """Let every rank write its metrics, and not one rank only."""
    enable_wandb: bool = False
    """Send metrics to Weights & Biases."""
    enable_jsonl: bool = True
    """Write metrics to dump_folder/metrics.jsonl, one object a line."""
    progress_bar: Literal["auto", "on", "off"] = "auto"
    """Show a progress bar; "auto": if stdout is a terminal."""


@dataclass
class Model:
    name: str = "llama3"
    """Name of a registered TrainSpec."""
    flavor: str = "debugmodel"
    """Which of the TrainSpec's sizes to train."""
    hf_assets_path: str = "./tests/assets/tokenizer"
    """Folder of a tokenizer and other files that a TrainSpec may read."""
    tokenizer_path: str | None = None
    """Tokenizer that a TrainSpec may read."""
    converters: list[str] = field(default_factory=list)
    """Names of registered model converters, applied in this order."""
    print_after_conversion: bool = False
    """Log the model when the converters have been applied."""


@dataclass
class Optimizer:
    name: str = "AdamW"
    """Adam or AdamW."""
    lr: float = 8e-4
    """Learning rate before the schedule's factor."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """fused: this project's step; foreach and for-loop: torch's."""
    early_step_in_backward: bool = False
    """Update each parameter in backward; torch's steps there can neither clip nor skip."""
    skip_nonfinite: bool = True
    """Change nothing in a step in which a gradient is not finite."""
    master_weights: Literal["fp32", "remainder", "remainder8"] | None = None
    """Keep what 16-bit parameters (training.dtype) lack of float32."""
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    """Dtype of the moments."""
    fp32_moments: list[str] = field(default_factory=lambda: ["embedding"])
    """What keeps fp32 moments with state_dtype int8: "embedding" or patterns of names."""
    stochastic_rounding: bool = False
    """Round bfloat16 parameters and moments at random, without bias."""
    rounding_seed: int = 0
    """Seed of stochastic_rounding."""
    write_back_gradients: bool = False
    """Write unscaled and clipped gradients back to memory."""
    track: list[Literal["norms", "lost_updates", "digest"]] = field(default_factory=list)
    """What to note of each parameter."""
    norm_in_backward: bool = False
    """Sum the squares of gradients in backward, while they are in cache (docs/step.md)."""
    amsgrad: bool = False
    """As torch.optim.AdamW's."""
    maximize: bool = False
    """As torch.optim.AdamW's."""


@dataclass
class LRScheduler:
    warmup_steps: int = 200
    """Steps over which the learning rate rises."""
    total_steps: int | None = None
    """Length of the schedule; None: training.steps."""
    decay_ratio: float | None = None
    """Share of the steps over which it falls; None: from the end of the warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the fall."""
    lr_min: float = 0.0
    """Where the fall ends, as a share of optimizer.lr."""


@dataclass
class DataLoader:
    num_workers: int = 0
    """Processes that load data."""
    persistent_workers: bool = False
    """Keep them from one epoch to the next."""
    pin_memory: bool = False
    """Load into pinned memory, for copies to a GPU."""
    prefetch_factor: int | None = None
    """Batches that each process loads ahead."""


@dataclass
class Training:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu with gloo or cuda with NCCL; auto: cuda where there is one."""
    dataset: str = "c4_test"
    """Name of a registered data set."""
    dataset_path: str | None = None
    """Where the data set is."""
    epochs: int = 0
    """How often the data set is read before training ends; 0: again and again."""
    batch_size: int = 8
    """Sequences that a rank reads at once."""
    global_batch_size: int = -1
    """Sequences of a step on all ranks, by gradient accumulation; -1: without."""
    seq_len: int = 2048
    """Tokens of a sequence."""
    max_norm: float = 1.0
    """Clip gradients to this norm in the step; inf: measure only."""
    max_consecutive_skips: int = 10
    """Steps in a row that may be skipped for gradients that are not finite; 0: any number."""
    steps: int = 10000
    """Steps to train."""
    enable_cpu_offload: bool = False
    """Keep FSDP's parameters, gradients and optimizer state in host memory."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the parameters."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of computation: of FSDP's gathered parameters, otherwise of autocast."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Dtype in which FSDP reduces gradients."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    gc_freq: int = 50
    """Steps from one garbage collection to the next."""
    gc_debug: bool = False
    """Collect garbage in every step."""
    seed: int | None = None
    """Seed of all random numbers; None: a new one, and data in the order of seed 0."""
    deterministic: bool = False
    """Let torch use deterministic algorithms only."""
    dataloader: DataLoader = field(default_factory=DataLoader)
    """Processes that load data."""


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = 1
    """Ranks that hold the same weights (DDP, or the outer dimension of HSDP)."""
    enable_compiled_autograd: bool = False
    """Compile backward, too."""
    data_parallel_shard_degree: int = -1
    """Ranks that divide the weights (FSDP); -1: all that are left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP frees gathered weights after forward; default: not in pipelines."""
    fsdp_keep_low_precision_shards: bool = False
    """Keep 16-bit copies of FSDP's shards, which steps write, instead of casting them to gather."""
    tensor_parallel_degree: int = 1
    """Ranks that divide each layer's matrices."""
    disable_loss_parallel: bool = False
    """Gather the logits for the loss under tensor parallelism."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallel communication; needs training.compile."""
    pipeline_parallel_degree: int = 1
    """Ranks that divide the layers among them."""
    pipeline_parallel_split_points: list[str] = field(default_factory=list)
    """Modules that begin a stage, such as layers.2."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Modules of each stage, in place of split points."""
    pipeline_parallel_first_stage_less_layers: int = 1
    """Layers that the first stage has less, for its embedding."""
    pipeline_parallel_last_stage_less_layers: int = 1
    """Layers that the last stage has less, for its output."""
    pipeline_parallel_layers_per_stage: int | None = None
    """Layers of a stage; None: as many stages as the schedule needs at least."""
    pipeline_parallel_schedule: str = "1F1B"
    """A schedule of torch.distributed.pipelining."""
    pipeline_parallel_schedule_csv: str | None = ""
    """File of a schedule of one's own."""
    pipeline_parallel_microbatch_size: int = 1
    """Sequences of a microbatch."""
    pipeline_parallel_expert_parallel_overlap: bool = True
    """Accepted for torchtitan's files."""
    context_parallel_degree: int = 1
    """Ranks that divide each sequence."""
    context_parallel_load_balancer: str | None = "headtail"
    """How a sequence is divided."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """How keys and values travel."""
    expert_parallel_degree: int = 1
    """Ranks that divide experts."""
    expert_tensor_parallel_degree: int = 1
    """Ranks that divide each expert."""
    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"
    """How tokens travel to experts."""
    zero: Literal["none", "greedy", "balanced"] = "none"
    """Divide the optimizer's state among replicas by ZeroRedundancyOptimizer."""


@dataclass
class Checkpoint:
    enable_checkpoint: bool = False
    """Save and load checkpoints."""
    enable_ft_dataloader_checkpoints: bool = True
    """Accepted for torchtitan's files."""
    folder: str = "checkpoint"
    """Folder of checkpoints in dump_folder."""
    interval: int = 500
    """Steps from one checkpoint to the next."""
    initial_load_path: str | None = None
    """Checkpoint to start from when the job has none of its own."""
    initial_load_model_only: bool = True
    """Load only the weights from initial_load_path."""
    initial_load_in_hf: bool = False
    """initial_load_path holds safetensors files."""
    initial_load_in_hf_quantized: bool = False
    """initial_load_path holds quantized safetensors files."""
    model_weights_only: bool = False
    """Save only the weights, in export_dtype, after the last step."""
    last_save_in_hf: bool = False
    """Accepted for torchtitan's files: use export_safetensors."""
    export_safetensors: bool = False
    """Write the weights as safetensors, too, after the last step."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Dtype of weights that are saved alone."""
    create_seed_checkpoint: bool = False
    """Save the initial weights, on one process, and end."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write checkpoints while training goes on."""
    keep_latest_k: int = 10
    """Checkpoints to keep; 0: all."""
    load_step: int = -1
    """Step to resume from; -1: the newest."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """What not to load: optimizer, lr_scheduler, dataloader, train_state, rng."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1, to learn early whether saving works."""
    load_only: bool = False
    """Load, and never save."""


@dataclass
class ActivationCheckpoint:
    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """Which activations backward computes again."""
    selective_ac_option: str = "2"
    """selective: every so many layers, or "op" for chosen operators."""
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(
        default_factory=lambda: ["moe.router.gate"]
    )
    """Modules whose matrix products are always computed again under "op"."""
    early_stop: bool = False
    """Stop computing again as soon as backward has what it needs."""
    memory_budget: float = 0.5
    """Share of activation memory that the compiler may use in mode memory_budget."""
    visualize_memory_budget_pareto: bool = False
    """Draw time against memory in mode memory_budget."""
    preserve_rng_state: bool = True
    """Repeat random numbers when computing again."""
    determinism_check: str = "default"
    """As torch.utils.checkpoint's."""
    debug: bool = False
    """As torch.utils.checkpoint's."""


@dataclass
class Compile:
    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    """What training.compile compiles."""
    backend: str = "inductor"
    """Compiler that torch.compile uses."""


@dataclass
class Comm:
    init_timeout_seconds: int = 300
    """Timeout of collectives until the first step is done."""
    train_timeout_seconds: int = 100
    """Timeout of collectives from then on."""
    trace_buf_size: int = 20000
    """Entries of NCCL's flight recorder; 0: off."""
    save_traces_folder: str = "comm_traces"
    """Folder of the flight recorder's files in dump_folder."""
    save_traces_file_prefix: str = "rank_"
    """Beginning of their names."""
    mode: Literal["default", "fake_backend", "local_tensor"] = "default"
    """Real communication; the others are torchtitan's."""


@dataclass
class MemoryEstimation:
    enabled: bool = False
    """torchtitan's estimation instead of training."""
    disable_fake_mode: bool = False
    """Estimate with real tensors."""


@dataclass
class FaultTolerance:
    enable: bool = False
    """Train replica groups that may come and go, with torchft."""
    process_group: str = "gloo"
    """torchft's backend between replica groups."""
    process_group_timeout_ms: int = 10000
    """Timeout of collectives between replica groups."""
    replica_id: int = 0
    """Which replica group this is."""
    group_size: int = 0
    """How many replica groups share the data."""
    min_replica_size: int = 1
    """Replica groups that a step needs."""
    semi_sync_method: str | None = None
    """local_sgd or diloco."""
    sync_steps: int = 5
    """Steps between synchronizations of semi_sync_method."""
    should_quantize: bool = False
    """Quantize what diloco sends."""
    fragment_sync_delay: int = 0
    """Steps by which diloco's fragments are late."""
    fragment_update_alpha: float = 0.0
    """Share of the local weights in diloco's mixture."""


@dataclass
class Experimental:
    custom_import: str = ""
    """Module to import at the start, which registers models and data sets."""


@dataclass
class Validation:
    enable: bool = False
    """Compute the loss over held-out data."""
    dataset: str = "c4_validation"
    """Name of a registered data set."""
    dataset_path: str | None = None
    """Where the data set is."""
    local_batch_size: int = 8
    """Sequences that a rank reads at once."""
    seq_len: int = 2048
    """Tokens of a sequence."""
    freq: int = 10
    """Steps from one validation to the next."""
    steps: int = -1
    """Batches that a rank reads; -1: all."""
    dataloader: DataLoader = field(default_factory=DataLoader)
    """Processes that load data."""


@dataclass
class Debug:
    deterministic_warn_only: bool = False
    """With training.deterministic: warn where torch has no deterministic algorithm."""
    moe_force_load_balance: bool = False
    """Give every expert the same number of tokens."""


@dataclass
class JobConfig:
    """A job's settings; `load_config` makes one from a file and a command line."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    mx: MX = field(default_factory=MX)
    quantize: Quantize = field(default_factory=Quantize)
    comm: Comm = field(default_factory=Comm)
    memory_estimation: MemoryEstimation = field(default_factory=MemoryEstimation)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    experimental: Experimental = field(default_factory=Experimental)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)

    def to_dict(self) -> dict[str, Any]:
        """All settings by section and name."""
        return asdict(self)
