"""JobConfig: all settings of a training job, in sections.

Sections, names and defaults are those of torchtitan at commit 96c11f922. Settings that torchtitan
0.2 added have its names. load_config.py translates names that differ between its versions.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torchopt_ext.optim.options import configures_step

__all__ = ["ConfigError", "JobConfig"]


class ConfigError(ValueError):
    """A setting is unknown, wrongly typed, out of range or not supported. The message names it."""


@contextmanager
def as_config_error(what: str = "") -> Iterator[None]:
    """Turns ValueError and NotImplementedError into ConfigError, which is shown without traceback.

    With ``what``, which says what cannot be done with a setting, turns OSError. Use it only around
    code whose arguments are all settings: other errors need a traceback.
    """
    kinds = (OSError,) if what else (ValueError, NotImplementedError)
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        raise ConfigError(f"{what}: {error}" if what else str(error)) from error


def expect_multiple(name: str, value: int, number: int, what: str) -> None:
    """Raises ConfigError unless a setting is a multiple of a number; ``what`` says of what."""
    if value < 1 or value % number:
        raise ConfigError(f"{name} is {value}, expected a multiple of {number}, {what}")


def at_least(least: float, *, default: Any, less_than: float = math.inf) -> Any:
    """Returns a dataclass field for numbers of `least` or more. load_config.py rejects others."""
    return field(default=default, metadata={"bounds": (least, less_than)})


@dataclass
class Job:
    config_file: str | None = None  # TOML file with the job's settings.
    dump_folder: str = "./outputs"  # Folder for everything that the job writes.
    description: str = "default job"  # Description of the job in the log.
    print_args: bool = False  # Log all settings at the start.
    save_config_file: str | None = None  # File in dump_folder to write all settings to, as JSON.
    custom_config_module: str = ""  # Module whose dataclass JobConfig adds sections and fields.


@dataclass
class Profiling:
    enable_profiling: bool = False  # Record traces with torch.profiler.
    save_traces_folder: str = "profile_traces"  # Folder for traces, in dump_folder.
    profile_freq: int = at_least(1, default=10)  # Steps from one trace to the next.
    profiler_active: int = at_least(1, default=1)  # Steps that a trace records.
    profiler_warmup: int = at_least(0, default=3)  # Steps that the profiler runs before it records.
    enable_memory_snapshot: bool = False  # Write snapshots of the CUDA allocator's memory.
    save_memory_snapshot_folder: str = "memory_snapshot"  # Folder for snapshots, in dump_folder.


@dataclass
class Metrics:
    log_freq: int = at_least(1, default=10)  # Steps from one line of metrics to the next.
    enable_tensorboard: bool = False  # Write metrics for TensorBoard.
    disable_color_printing: bool = False  # Print without colors, also on a terminal.
    save_tb_folder: str = "tb"  # Folder for TensorBoard's files, in dump_folder.
    save_for_all_ranks: bool = False  # Write metrics on every rank instead of one rank.
    enable_wandb: bool = False  # Send metrics to Weights & Biases.
    enable_jsonl: bool = True  # Write metrics to dump_folder/metrics.jsonl, one object per line.
    progress_bar: Literal["auto", "on", "off"] = "auto"  # Show a bar; auto: on a terminal.


@dataclass
class Model:
    name: str = "llama3"  # Name of a registered TrainSpec.
    flavor: str = "debugmodel"  # Size of the model: a key of the TrainSpec's config.
    hf_assets_path: str = "./tests/assets/tokenizer"  # Folder of tokenizers, for TrainSpecs.
    tokenizer_path: str | None = None  # Path of a tokenizer that a TrainSpec may read.
    converters: list[str] = field(default_factory=list)
    """Names of registered model converters, applied in this order."""
    print_after_conversion: bool = False  # Log the model after the converters were applied.


@dataclass
@configures_step("max_grad_norm")  # training.max_norm
class Optimizer:
    name: str = "AdamW"  # Adam, AdamW, Lion, Muon (with AdamW beside it) or SGD.
    lr: float | None = at_least(0, default=None)
    """Learning rate, which the schedule's factor multiplies. None, here and below: 8e-4 for Adam
    and AdamW, otherwise the algorithm's own default."""
    beta1: float | None = at_least(0, default=None, less_than=1)
    """Decay of the first moment (None: 0.9); Lion: share of the moment in the direction."""
    beta2: float | None = at_least(0, default=None, less_than=1)
    """Decay of the second moment (None: 0.95); Lion: of the first."""
    eps: float | None = at_least(0, default=None)
    """Added to the square root of the second moment (None: 1e-8)."""
    weight_decay: float | None = at_least(0, default=None)
    """Weight decay (None: 0.1): decoupled for AdamW and Lion, added to the gradient for Adam and
    SGD."""
    no_decay: list[str] = field(default_factory=list)
    """Without weight decay: "norm", "bias", "vector", "embedding" or patterns of names."""
    lr_multipliers: dict[str, float] = field(default_factory=dict)
    """Factors of the learning rate by pattern of names; the first match decides."""
    muon: list[str] = field(default_factory=list)
    """Patterns of names of matrices that Muon steps, although AdamW would."""
    adamw: list[str] = field(default_factory=list)
    """Patterns of names of matrices that AdamW steps, although Muon would."""
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] = "match_rms_adamw"
    """Muon's factor of the learning rate by shape; match_rms_adamw: one that also fits AdamW."""
    ns_coefficients: Literal["jordan", "polar_express", "quintic", "deepseek_v4", "cans"] = "jordan"
    """Coefficients of Muon's Newton-Schulz iterations."""
    ns_steps: int = at_least(0, default=5)  # Newton-Schulz iterations, where they may be chosen.
    ema_decay: float | None = at_least(0, default=None)
    """Decay of a moving average of the weights, with which validation runs (None: no average)."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """fused: torchopt_ext's step; foreach, for-loop: torch's step."""
    early_step_in_backward: bool = False  # Update in backward; only fused then clips and skips.
    skip_nonfinite: bool = True  # Skip updates whose gradients or loss are not finite.
    amsgrad: bool = False  # As in torch.optim.AdamW.
    momentum: float = at_least(0, default=0.0)  # As in torch.optim.SGD; Muon: 0 means 0.95.
    dampening: float = 0.0  # As in torch.optim.SGD.
    nesterov: bool = False  # As in torch.optim.SGD.
    maximize: bool = False  # As in torch.optim.AdamW.
    cautious_weight_decay: bool = False  # Decay weights only where steps do not point against them.
    decay_follows_lr: bool = False  # Let the weight decay fall with the learning rate (AdamC).


@dataclass
class LRScheduler:
    warmup_steps: int = at_least(0, default=200)  # Steps over which the learning rate rises.
    total_steps: int | None = at_least(1, default=None)
    """Length of the schedule; None: training.steps."""
    decay_ratio: float | None = at_least(0, default=None)
    """Share of the steps in which the learning rate decays; None: all steps after the warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"  # Shape of the decay.
    lr_min: float = 0.0  # Learning rate at the end of the decay, as a share of optimizer.lr.


@dataclass
class DataLoader:
    num_workers: int = 0  # Worker processes that load data.
    persistent_workers: bool = False  # Keep worker processes from one epoch to the next.
    pin_memory: bool = False  # Load into pinned memory, for copies to a GPU.
    prefetch_factor: int | None = at_least(1, default=None)  # Batches that each worker prefetches.


@dataclass
class Training:
    device: Literal["auto", "cpu", "cuda"] = "auto"  # cpu: gloo; cuda: NCCL; auto: cuda, if any.
    dataset: str = "c4_test"  # Name of a registered data set.
    dataset_path: str | None = None  # Path of the data set.
    epochs: int = at_least(0, default=0)  # Passes over the data set; 0: no limit.
    batch_size: int = at_least(1, default=8)  # Sequences in one local batch of a rank.
    global_batch_size: int = at_least(-1, default=-1)
    """Sequences of a step on all ranks, by gradient accumulation; -1: no accumulation."""
    seq_len: int = at_least(1, default=2048)  # Tokens per sequence.
    max_norm: float = 1.0  # Clip gradients to this norm in the step; inf: measure only.
    max_consecutive_skips: int = at_least(0, default=10)  # End after so many in a row; 0: never.
    steps: int = at_least(0, default=10000)  # Steps to train.
    enable_cpu_offload: bool = False  # Keep FSDP's weights, gradients and state in host memory.
    dtype: Literal["bfloat16", "float32"] = "float32"  # Dtype of the parameters.
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype: of FSDP's gathered parameters, without FSDP of autocast."""
    mixed_precision_reduce: Literal["float32"] = "float32"  # Dtype in which FSDP reduces gradients.
    compile: bool = False  # Compile each layer with torch.compile.
    gc_freq: int = at_least(1, default=50)  # Steps from one garbage collection to the next.
    gc_debug: bool = False  # Collect garbage in every step.
    seed: int | None = at_least(0, default=None, less_than=1 << 64)
    """Seed of all random numbers; None: a random seed, and data in the order of seed 0."""
    deterministic: bool = False
    """Let torch use deterministic algorithms only. DDP keeps its first buckets, so that a resumed
    job has the same bits; it then looks for unused parameters, and warns if it finds none."""
    dataloader: DataLoader = field(default_factory=DataLoader)  # Worker processes that load data.


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = 1
    """Replicas of the weights (DDP, or the outer dimension of HSDP)."""
    enable_compiled_autograd: bool = False  # Also compile backward, with compiled autograd.
    data_parallel_shard_degree: int = -1  # Ranks that shard the weights (FSDP); -1: the rest.
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free FSDP's gathered weights after forward; default: except in pipelines."""
    fsdp_keep_low_precision_shards: bool = False  # Steps write the 16-bit shards to gather.
    tensor_parallel_degree: int = 1  # Ranks that shard each layer's matrices (tensor parallelism).
    disable_loss_parallel: bool = False  # Under tensor parallelism, gather the logits for the loss.
    pipeline_parallel_degree: int = 1  # Ranks that split the layers into pipeline stages.
    pipeline_parallel_split_points: list[str] = field(default_factory=list)
    """Modules that begin a stage, such as layers.2."""
    pipeline_parallel_first_stage_less_layers: int = 1  # Layers that the embedding counts as.
    pipeline_parallel_last_stage_less_layers: int = 1  # Layers that the output counts as.
    pipeline_parallel_layers_per_stage: int | None = None  # Most layers of a stage; None: any.
    pipeline_parallel_schedule: str = "1F1B"  # Name of a schedule of torch.distributed.pipelining.
    pipeline_parallel_microbatch_size: int = at_least(1, default=1)  # Sequences per microbatch.
    context_parallel_degree: int = 1  # Ranks that shard each sequence (context parallelism).
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """Collective that exchanges keys and values."""
    zero: Literal["none", "greedy", "balanced"] = "none"
    """Shard the optimizer's state over replicas with ZeroRedundancyOptimizer."""


@dataclass
class Checkpoint:
    enable_checkpoint: bool = False  # Save and load checkpoints.
    folder: str = "checkpoint"  # Folder for checkpoints, in dump_folder.
    interval: int = at_least(1, default=500)  # Steps from one checkpoint to the next.
    initial_load_path: str | None = None  # Checkpoint to start from if the job has none.
    initial_load_model_only: bool = True  # Load only the weights from initial_load_path.
    model_weights_only: bool = False  # Save only the weights, in export_dtype, after the last step.
    export_safetensors: bool = False  # After the last step, also write the weights as safetensors.
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Dtype of the weights for model_weights_only and export_safetensors."""
    create_seed_checkpoint: bool = False  # Save the initial weights, in one process, and exit.
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write checkpoints while training continues."""
    keep_latest_k: int = at_least(0, default=10)  # Checkpoints to keep; 0: all.
    load_step: int = at_least(-1, default=-1)  # Step to resume from; -1: the newest checkpoint.
    exclude_from_loading: list[str] = field(default_factory=list)
    """States not to load: model, optimizer, lr_scheduler, dataloader, train_state, rng."""
    enable_first_step_checkpoint: bool = False  # Save after step 1, to find out if it works.
    load_only: bool = False  # Load checkpoints, but save none.


@dataclass
class ActivationCheckpoint:
    mode: Literal["selective", "full", "none"] = "selective"  # Activations to recompute.
    selective_ac_option: str = "2"
    """For mode selective: n for every n-th layer, or "op" for all but costly operators."""
    early_stop: bool = False  # Stop recomputation as soon as backward has everything that it needs.
    preserve_rng_state: bool = True  # Use the same random numbers in recomputation.
    determinism_check: str = "default"  # As in torch.utils.checkpoint.
    debug: bool = False  # As in torch.utils.checkpoint.


@dataclass
class Compile:
    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    """Parts that training.compile compiles."""


@dataclass
class Comm:
    init_timeout_seconds: int = at_least(1, default=300)
    """Timeout of collectives until the first step is done."""
    train_timeout_seconds: int = at_least(1, default=100)  # Collectives' timeout after step 1.
    trace_buf_size: int = at_least(0, default=20000)  # Entries of NCCL's flight recorder; 0: off.
    save_traces_folder: str = "comm_traces"  # Folder of the flight recorder, in dump_folder.
    save_traces_file_prefix: str = "rank_"  # Prefix of the names of the flight recorder's files.


@dataclass
class FaultTolerance:
    enable: bool = False  # Train with torchft in replica groups that may fail and come back.
    process_group: Literal["gloo", "nccl"] = "gloo"  # torchft's backend between replica groups.
    process_group_timeout_ms: int = 10000  # Timeout of collectives between replica groups.
    replica_id: int = 0  # Index of this replica group.
    group_size: int = 0  # Number of replica groups that share the data.
    min_replica_size: int = 1  # Smallest number of replica groups for a step.


@dataclass
class Experimental:
    custom_import: str = ""  # Module to import at the start, which registers models and data sets.


@dataclass
class Validation:
    enable: bool = False  # Compute the loss over held-out data.
    dataset: str = "c4_validation"  # Name of a registered data set.
    dataset_path: str | None = None  # Path of the data set.
    local_batch_size: int = at_least(1, default=8)  # Sequences in one local batch of a rank.
    seq_len: int = at_least(1, default=2048)  # Tokens per sequence.
    freq: int = at_least(1, default=10)  # Steps from one validation to the next.
    steps: int = at_least(-1, default=-1)  # Batches that a rank reads; -1: all.
    dataloader: DataLoader = field(default_factory=DataLoader)  # Worker processes that load data.


@dataclass
class JobConfig:
    """All settings of a job. `load_config` reads them from a TOML file and a command line."""

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
    comm: Comm = field(default_factory=Comm)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    experimental: Experimental = field(default_factory=Experimental)
    validation: Validation = field(default_factory=Validation)

    unused: dict[str, Any] = field(default_factory=dict, init=False)
    """Values that a file or command line has for settings of torchtitan that this Trainer lacks."""

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings by section and name."""
        return asdict(self)
