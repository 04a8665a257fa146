"""CheckpointManager: when the Trainer saves, and what it resumes from.

Interface and keys are those of torchtitan's (torchtitan/components/checkpoint.py). What writes and
reads is torch.distributed.checkpoint (DCP).
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from torchopt_ext.optim.collective import agree, all_gather_text, all_or_none
from torchopt_ext.statedict import dcp
from torchopt_ext.trainer import checkpoint_files as files
from torchopt_ext.trainer import checkpoint_states as states_of
from torchopt_ext.trainer.checkpoint_files import File, Manifest

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER, RNG = (
    "model",
    "optimizer",
    "lr_scheduler",
    "dataloader",
    "rng",
)
_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
_MODES = ("disabled", "async", "async_with_pinned_mem")


class CheckpointManager:
    """Saves and loads everything that a job needs to go on as if it had never stopped.

    A checkpoint is complete or not there: it is written beside, with size and CRC-32 of every file
    in a manifest, and renamed when all ranks have written. All ranks call `save` and `load`.

    Attributes:
        folder: where the checkpoints are, each in `step-N`.

    Args:
        dataloader: with `state_dict` and `load_state_dict`, whose keys differ by data-parallel
            rank; None: nothing is saved of it.
        model_parts, optimizers, lr_schedulers: what is trained.
        states: further objects to save, by key, such as {"train_state": trainer}.
        job_config: `checkpoint`, `job.dump_folder`, `training.steps` and `parallelism` of it.
        ft_manager: `enabled` and, if so, torchft's `manager`.

    Raises:
        ValueError: a setting that is wrong or cannot be honoured; names it.
    """

    folder: Path

    def __init__(
        self,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        job_config: Any,
        ft_manager: Any = None,
    ) -> None:
        self._config = config = job_config.checkpoint
        self._enabled = config.enable_checkpoint
        self._model_parts, self._last_step = model_parts, job_config.training.steps
        self._states = states | {OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers}
        self.folder = Path(job_config.job.dump_folder) / config.folder
        self._manager = ft_manager.manager if ft_manager and ft_manager.enabled else None
        if self._manager is not None:
            optimizers.init_cache_state_dict()
            self._manager.set_state_dict_fns(self._heal, self._live_state)
        if not self._enabled:
            return
        self._check_config()
        self._group: Any = None
        self._rank, ranks = 0, 1
        if dist.is_available() and dist.is_initialized():
            # Of its own, for saves go on beside the training's collectives.
            self._group = dist.new_group(backend="gloo")
            self._rank, ranks = dist.get_rank(), dist.get_world_size()
        self._ranks = ranks
        layout = _layout(job_config.parallelism, ranks)
        self._own: dict[str, Any] = {RNG: states_of.RandomState(self._rank, layout)}
        if dataloader is not None:
            self._own[DATALOADER] = states_of.DataPosition(dataloader)
        self._refused: set[int] = set()
        self._done: int | None = None  # the last step saved by this process
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._remover = ThreadPoolExecutor(1, "checkpoint-removal")
        self._pending: tuple[int, Future[None]] | None = None
        self._staged: Future[Any] | None = None
        with all_or_none(self._group):
            if self._rank == 0 and not config.load_only:
                files.recover(self.folder)

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, curr_step: int, force: bool = False) -> None:
        """Saves if this step is due: each interval, step 1 if asked for, and when forced.

        Step 0 saves the model only, as a seed for jobs of any parallelism. A forced save of the
        last step saves the model only, in `export_dtype`, if `model_weights_only` says so. In the
        asynchronous modes the call copies the state to host memory, and a thread writes it; forced
        saves are always written when the call returns.

        A periodic save that fails is logged as an error, on all ranks, and training goes on.

        Raises:
            RuntimeError: on all ranks, if a forced save failed, or the one of step 1, whose failure
                an asynchronous mode raises in the next call.
        """
        if not self._is_due(curr_step, force):
            return
        self._finish_pending(raises=True)
        model_only = curr_step == 0 or (
            force and curr_step >= self._last_step and self._config.model_weights_only
        )
        if self._done == curr_step and not model_only:
            return
        begin = time.monotonic()
        contents = "model" if model_only else "full"
        with all_or_none(self._group):
            state = self._exported() if model_only and curr_step else self._live_state_of(contents)
        if force or self._config.async_mode == "disabled":
            try:
                self._write(curr_step, contents, state, begin)
            except RuntimeError as error:
                if force or curr_step == 1:
                    raise
                logger.error("%s; training goes on", error)
            return
        staged = self._stage(state)
        self._pending = (
            curr_step,
            self._writer.submit(self._write, curr_step, contents, staged, begin),
        )

    def _is_due(self, step: int, force: bool) -> bool:
        if not self._enabled or self._config.load_only:
            return False
        if self._manager is not None and self._manager.participating_rank() != 0:
            return False  # another replica group saves the same
        first = step == 1 and self._config.enable_first_step_checkpoint
        return force or first or step % self._config.interval == 0

    def _live_state_of(self, contents: str) -> dict[str, Any]:
        """What a checkpoint holds, by key; tensors are the live ones."""
        model = states_of.model_state(self._model_parts)
        if contents == "model":
            return model
        rest = self._states | self._own
        if both := sorted(model.keys() & rest.keys()):
            raise ValueError(f"the model has {both}, which are keys of other entries")
        return model | {key: value.state_dict() for key, value in rest.items()}

    def _exported(self) -> dict[str, Any]:
        """The model in `export_dtype`."""
        dtype = _DTYPES[self._config.export_dtype]
        model = states_of.model_state(self._model_parts)
        return {
            name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in model.items()
        }

    def _stage(self, state: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Copies the state to host memory, or lets a stream do so; how to get the copy."""
        pinned = self._config.async_mode == "async_with_pinned_mem"
        stager = DefaultStager(StagingOptions(pinned, False, pinned, pinned))
        copy = stager.stage(state)
        if isinstance(copy, Future):
            self._staged = copy
            copy.add_done_callback(lambda _: None)
            return copy.result
        return lambda: copy

    def _write(
        self,
        step: int,
        contents: str,
        state: dict[str, Any] | Callable[[], dict[str, Any]],
        begin: float,
    ) -> None:
        """Writes and publishes a checkpoint, on all ranks or none.

        Raises:
            RuntimeError: what failed, with the step; what was written is removed.
        """
        saving = files.saving_folder(self.folder, step)
        try:
            writer = files.Writer(saving)
            dcp_save(
                state() if callable(state) else state,
                storage_writer=writer,
                process_group=self._group,
                no_dist=self._group is None,
            )
            written = self._gathered(writer.written)
            manifest = Manifest(step, contents, written)
            with all_or_none(self._group):
                if self._rank == 0:
                    files.commit(self.folder, manifest)
        except (Exception, CheckpointException) as error:  # the latter is none of them
            if self._rank == 0:
                shutil.rmtree(saving, ignore_errors=True)
            raise RuntimeError(f"saving step {step} in {self.folder}: {_reason(error)}") from error
        self._done = step
        self._refused.discard(step)
        if self._rank == 0:
            _log("Saved step %d (%s, %.1f MB) in %.2f s", step, contents, manifest.size, begin)
            self._remover.submit(self._remove_old)

    def _gathered(self, written: dict[str, File]) -> dict[str, File]:
        mine = json.dumps({name: asdict(file) for name, file in written.items()})
        texts = [mine]
        if self._group is not None:
            texts = all_gather_text(mine, self._group, "listing a checkpoint's files")
        every = [item for text in texts for item in json.loads(text).items()]
        return {name: File(**file) for name, file in every}

    def _remove_old(self) -> None:
        """All but the newest `keep_latest_k`; a seed and what is not known to be usable stay."""
        usable = [step for step in files.steps(self.folder) if step not in self._refused]
        for step in usable[self._config.keep_latest_k :] if self._config.keep_latest_k else ():
            if step > 0:
                try:
                    files.remove(self.folder / f"step-{step}")
                except OSError as error:
                    logger.warning("removing step %d of %s: %s", step, self.folder, error)

    def maybe_wait_for_staging(self) -> None:
        """Waits until the state is copied to host memory; call it before the next step changes it.

        Only "async_with_pinned_mem" copies beside the training.
        """
        if self._enabled and self._staged is not None:
            staged, self._staged = self._staged, None
            staged.exception()  # the save raises it

    def close(self) -> None:
        """Waits for a save and for removals under way; an error of the save is logged."""
        if not self._enabled:
            return
        self._finish_pending(raises=False)
        self._writer.shutdown()
        self._remover.shutdown()

    def _finish_pending(self, *, raises: bool) -> None:
        """Waits for the save under way; logs its error, or raises that of step 1."""
        self.maybe_wait_for_staging()
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        error = future.exception()
        if error is not None and raises and (step == 1 or not isinstance(error, RuntimeError)):
            raise error
        if error is not None:
            logger.error("%s; training goes on", error)

    # ---- loading ---------------------------------------------------------------------------------

    def load(self, step: int = -1) -> bool:
        """Loads the newest usable checkpoint, or that of a step; whether there was one.

        Every file is checked first. Of -1, damaged checkpoints are skipped with a warning. Without
        any, `initial_load_path` is loaded if it is set. Step 0 has the model only.

        Raises:
            ValueError: on all ranks, if that step's checkpoint, or each of several, is damaged or
                does not fit; says what is wrong.
            FileNotFoundError: that step has none.
        """
        if not self._enabled:
            return False
        self._finish_pending(raises=True)
        if step != -1:
            checkpoint = self.folder / f"step-{step}"
            if not self._agreed(checkpoint.is_dir()):
                raise FileNotFoundError(
                    f"checkpoint.load_step is {step}, but {checkpoint} does not exist"
                )
            if problem := self._problem(checkpoint, step):
                raise ValueError(f"{checkpoint} cannot be loaded: {problem}")
            self._load(checkpoint, model_only=step == 0, step=step)
            return True
        found = self._agreed(files.steps(self.folder))
        refused = []
        for candidate in found:
            checkpoint = self.folder / f"step-{candidate}"
            problem = self._problem(checkpoint, candidate)
            if not problem:
                self._load(checkpoint, model_only=candidate == 0, step=candidate)
                return True
            self._refused.add(candidate)
            refused.append(f"step {candidate}: {problem}")
            if self._rank == 0:
                logger.warning("Skipped %s: %s", checkpoint, problem)
        if refused:
            raise ValueError(
                f"no checkpoint in {self.folder} can be loaded, and training from the beginning "
                f"would replace them: choose another folder for that; {'; '.join(refused)}"
            )
        if self._config.initial_load_path:
            self._load_initial(Path(self._config.initial_load_path))
            return True
        return False

    def newest(self) -> int | None:
        """The last step with a complete checkpoint that was not found damaged, if any."""
        if not self._enabled:
            return None
        return next((step for step in files.steps(self.folder) if step not in self._refused), None)

    def _load_initial(self, checkpoint: Path) -> None:
        """The model, or everything, of another job's checkpoint."""
        model_only = self._config.initial_load_model_only
        if not self._agreed(checkpoint.is_dir()):
            raise ValueError(f"checkpoint.initial_load_path is {checkpoint}, which is no folder")
        if problem := self._problem(checkpoint, None):
            raise ValueError(f"{checkpoint} cannot be loaded: {problem}")
        self._load(checkpoint, model_only=model_only, step=0)

    def _problem(self, checkpoint: Path, step: int | None) -> str:
        """What is wrong with a checkpoint, the same text on all ranks; each checks some files."""
        problem = ""
        try:
            manifest = files.read_manifest(checkpoint)
            if manifest is None:
                wrong = files.too_short(checkpoint, files.read_metadata(checkpoint))
            else:
                mine = files.share(manifest.files, self._rank, self._ranks)
                wrong = files.problems(checkpoint, mine)
                if step is not None and manifest.step != step:
                    wrong.append(f"its manifest is of step {manifest.step}")
                if step and manifest.contents != "full":
                    wrong.append("it has the model only; set initial_load_path to start with it")
            problem = "; ".join(wrong)
        except (ValueError, OSError) as error:
            problem = str(error)
        try:
            agree(problem or None, self._group, ValueError)
        except ValueError as error:
            return str(error)
        return ""

    def _load(self, checkpoint: Path, *, model_only: bool, step: int) -> None:
        begin = time.monotonic()
        with all_or_none(self._group):
            metadata = files.read_metadata(checkpoint)
            model = states_of.model_state(self._model_parts)
            rest = {} if model_only else self._wanted(self._states | self._own)
            if MODEL in self._config.exclude_from_loading and not model_only:
                model = {}
            if missing := sorted(model.keys() - metadata.state_dict_metadata.keys()):
                raise ValueError(f"{checkpoint} lacks of the model: {', '.join(missing)}")
        reader = dcp.Reader(checkpoint)
        own = {key: value for key, value in rest.items() if key in self._own}
        found = {key: dict.fromkeys(value.names_to_load(metadata)) for key, value in own.items()}
        others = {key: value for key, value in rest.items() if key not in own}
        wanted = model | others | found
        dcp.load(wanted, storage_reader=reader, process_group=self._group, no_dist=not self._group)
        if model:
            states_of.set_model_state(self._model_parts, wanted)
        with all_or_none(self._group):
            if DATALOADER in own:
                own[DATALOADER].load_state_dict(wanted[DATALOADER])
        if RNG in own and not own[RNG].load_state_dict(wanted[RNG]):
            states_of.reseed(step)
            if self._rank == 0:
                logger.warning(
                    "%s is of another layout of ranks: random number generators are seeded anew",
                    checkpoint,
                )
        if self._rank == 0:
            size = sum(path.stat().st_size for path in checkpoint.iterdir())
            contents = "model" if model_only else "full"
            _log("Loaded step %d (%s, %.1f MB) in %.2f s", step, contents, size, begin)

    def _wanted(self, entries: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in entries.items() if k not in self._config.exclude_from_loading}

    def _agreed(self, value: Any) -> Any:
        """Rank 0's value, which JSON can hold."""
        if self._group is None:
            return value
        text = json.dumps(value) if self._rank == 0 else ""
        return json.loads(all_gather_text(text, self._group, "choosing a checkpoint")[0])

    # ---- settings and fault tolerance ------------------------------------------------------------

    def _check_config(self) -> None:
        config = self._config
        if config.async_mode not in _MODES:
            raise ValueError(
                f"checkpoint.async_mode is {config.async_mode!r}, expected one of {_MODES}"
            )
        parameter = next((p for part in self._model_parts for p in part.parameters()), None)
        on_host = parameter is None or parameter.device.type == "cpu"
        if config.async_mode == "async_with_pinned_mem" and on_host:
            raise ValueError(
                "checkpoint.async_mode is 'async_with_pinned_mem', which copies from a GPU to the "
                "host, but the model is on the CPU: set 'async'"
            )
        if config.export_dtype not in _DTYPES:
            raise ValueError(
                f"checkpoint.export_dtype is {config.export_dtype!r}, expected one of {[*_DTYPES]}"
            )
        for name, least in ("interval", 1), ("keep_latest_k", 0):
            if getattr(config, name) < least:
                raise ValueError(
                    f"checkpoint.{name} is {getattr(config, name)}, expected {least} or more"
                )
        known = [*self._states, MODEL, DATALOADER, RNG]
        if unknown := [key for key in config.exclude_from_loading if key not in known]:
            raise ValueError(
                f"checkpoint.exclude_from_loading has {unknown}, expected some of {known}"
            )

    def _live_state(self) -> dict[str, Any]:
        """What a replica group sends to one that heals."""
        rest = {key: value.state_dict() for key, value in self._states.items()}
        return rest | {MODEL: states_of.model_state(self._model_parts)}

    def _heal(self, state: dict[str, Any]) -> None:
        states_of.set_model_state(self._model_parts, state[MODEL])
        for key, value in self._states.items():
            value.load_state_dict(state[key])


def _layout(config: Any, ranks: int) -> str:
    """Which ranks do the same work: random states of another layout are those of other work."""
    degrees: Iterable[str] = (
        "data_parallel_replicate",
        "data_parallel_shard",
        "context_parallel",
        "tensor_parallel",
        "pipeline_parallel",
    )
    found = {name: getattr(config, f"{name}_degree") for name in degrees}
    if found["data_parallel_shard"] == -1:
        others = 1
        for name, degree in found.items():
            others *= degree if name != "data_parallel_shard" else 1
        found["data_parallel_shard"] = ranks // others
    return json.dumps(found)


def _reason(error: BaseException) -> str:
    """One line of a failed save: of DCP's the ranks' errors without their traces."""
    if isinstance(error, CheckpointException):
        found = {f"rank {rank}: {problem}" for rank, (problem, _) in error.failures.items()}
        return "; ".join(sorted(found))
    return str(error) or type(error).__name__


def _log(text: str, step: int, contents: str, size: int, begin: float) -> None:
    logger.info(text, step, contents, size / 1e6, time.monotonic() - begin)
