"""CheckpointManager: when the Trainer saves, and what it resumes from.

Interface and keys are those of torchtitan (torchtitan/components/checkpoint.py).
torch.distributed.checkpoint (DCP) writes and reads.
"""

import logging
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from torchopt_ext.state.collective import all_gather_json, fail_together, raise_together
from torchopt_ext.statedict import dcp
from torchopt_ext.trainer import checkpoint_files as files
from torchopt_ext.trainer import checkpoint_states as states_of
from torchopt_ext.trainer import saved_values
from torchopt_ext.trainer.checkpoint_files import MANIFEST, Manifest
from torchopt_ext.trainer.checkpoint_writer import Planner, Staged, Writer
from torchopt_ext.trainer.config import ConfigError, as_config_error
from torchopt_ext.trainer.distributed import DTYPES, seed_generators
from torchopt_ext.trainer.export import export_safetensors

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER, LR_SCHEDULER = "model", "optimizer", "lr_scheduler"
DATALOADER, RNG, TORCHFT = "dataloader", "rng", "torchft"


class CheckpointManager:
    """Saves and loads everything that a job needs to continue as if it had never stopped.

    A checkpoint is complete or absent: it is written under another name, with a manifest of sizes
    and CRC-32s, and renamed to `folder`/step-N when all ranks have written. All ranks call `save`
    and `load`.

    Args:
        dataloader: has `state_dict` and `load_state_dict`. Entries that differ between
            data-parallel ranks must have different keys. None: no data position is saved. If it has
            `same_position_on_all_ranks` and that is true, returning replica groups take a peer's
            position while they iterate; if it is false, its position must be excluded from loading.
        states: further objects to save, by key, such as {"train_state": trainer}.
        ft_manager: has `enabled` and, if it is true, torchft's `manager`.

    Raises:
        ValueError: A setting is wrong or cannot be honored. The message names the setting.
    """

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
        self.folder = Path(job_config.job.dump_folder, config.folder)
        self._manager = ft_manager.manager if ft_manager and ft_manager.enabled else None
        if self._manager is not None:
            shared = getattr(dataloader, "same_position_on_all_ranks", None)
            loads_data = self._enabled and DATALOADER not in config.exclude_from_loading
            if loads_data and shared is False:  # a group saves for all, which lack its position
                raise ValueError(
                    "a data set without a length has a position in each replica group, and "
                    "checkpoints under fault_tolerance hold one group's: set "
                    "checkpoint.exclude_from_loading = ['dataloader'], which reads it from the "
                    "beginning after a restart"
                )
            optimizers.init_cache_state_dict()
            data = {DATALOADER: dataloader} if shared else {}
            peer = states_of.PeerState(model_parts, self._states | data)
            self._manager.set_state_dict_fns(peer.load_state_dict, peer.state_dict)
        if not self._enabled:
            return
        on_host = not any(p.is_cuda for part in model_parts for p in part.parameters())
        if config.async_mode == "async_with_pinned_mem" and on_host:
            raise ValueError(
                "checkpoint.async_mode is 'async_with_pinned_mem', which copies from a GPU to the "
                "host, but the model is on the host: set 'async'"
            )
        keys = [*self._states, MODEL, DATALOADER, RNG, TORCHFT]
        if unknown := [key for key in config.exclude_from_loading if key not in keys]:
            raise ValueError(
                f"checkpoint.exclude_from_loading has {unknown}, expected some of {keys}"
            )
        self._group: Any = None
        self._rank, self._ranks = 0, 1
        if dist.is_initialized():
            # A separate group, because saves run during the training's collectives.
            self._group = dist.new_group(backend="gloo")
            self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._positions: dict[str, Any] = {}
        if dataloader is not None:
            self._positions[DATALOADER] = states_of.DataPosition(dataloader)
        if self._manager is not None:
            # Its steps: groups of which only some have the checkpoint would all be at step 0, and
            # torchft would choose whose weights to keep without regard to the loaded ones.
            self._positions[TORCHFT] = self._manager
        layout = states_of.layout(job_config.parallelism, self._ranks)
        self._positions[RNG] = states_of.RandomState(self._rank, layout)  # last: others may draw
        self._refused: set[int] = set()
        self._done: int | None = None  # the last step that this process saved in full
        self._delayed = False  # whether skipped steps delay a periodic save
        self._dropped_keys: set[str] = set()  # keys that checkpoints leave out
        self._resumed_step: int | None = None  # load_step, until the first save
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # Separate, because other ranks wait for rank 0 in the next save, but not for removals.
        self._remover = ThreadPoolExecutor(1, "remove checkpoints")
        self._pending: tuple[int, Future[None]] | None = None
        self._staged: Staged | None = None
        self._lock: IO[str] | None = None
        with fail_together(self._group):
            # A replica group must not touch files that another group may be saving.
            if self._rank == 0 and not config.load_only and self._manager is None:
                with as_config_error("checkpoint.folder cannot be used"):
                    self._lock = files.recover(self.folder)

    # ---- saving ----------------------------------------------------------------------------------

    @torch.no_grad()
    def save(
        self, curr_step: int, force: bool = False, *, ended: bool = False, skipping: bool = False
    ) -> None:
        """Saves if this step is due: at each interval, at step 1 if configured, and if forced.

        Step 0 saves only the model, as a seed for jobs of any parallelism. So does a forced save of
        the last step, in `export_dtype`, if `model_weights_only` is set. `export_safetensors` also
        writes the last model to `step-N.safetensors`. In asynchronous modes the call copies the
        state to host memory, and a thread writes it. Forced saves are done when the call returns.

        If a periodic save fails, all ranks log an error, and training continues.

        Args:
            ended: whether this is the last step, whatever `training.steps` says.
            skipping: whether the latest steps were skipped. If so on any rank, a periodic save,
                except at step 1, waits for a step that is not skipped: the weights may be bad.

        Raises:
            RuntimeError: A forced save or the save at step 1 failed. All ranks raise. For step 1 an
                asynchronous mode raises in the next call.
            TypeError, ValueError: The state cannot be saved and loaded again. All ranks raise. The
                message names the entry.
        """
        if not self.is_due(curr_step, force):
            return
        self._finish_pending(raises=True)
        if not force and curr_step != 1:
            self._delayed = any(all_gather_json(skipping, self._group, "whether a save is due"))
            if self._delayed:
                return
        last = force and (ended or curr_step >= self._last_step)
        model_only = curr_step == 0 or (last and self._config.model_weights_only)
        if model_only or self._done != curr_step:
            self._start(curr_step, "model" if model_only else "full", last, force)
        if last and curr_step and self._config.export_safetensors:
            with fail_together(self._group):
                if self._rank == 0:
                    checkpoint = self.folder / f"step-{curr_step}"
                    export_safetensors(checkpoint, f"{checkpoint}.safetensors", self._export_dtype)

    def is_due(self, step: int, force: bool = False) -> bool:
        """Returns whether :meth:`save` would save this step."""
        if not self._enabled or self._config.load_only:
            return False
        if self._manager is not None and self._manager.participating_rank() != 0:
            return False  # another replica group saves the same
        first = step == 1 and self._config.enable_first_step_checkpoint
        return force or first or self._delayed or step % self._config.interval == 0

    def _start(self, step: int, contents: str, last: bool, force: bool) -> None:
        """Writes a checkpoint, or lets a thread write it. All ranks succeed, or all ranks raise."""
        begin, now = time.monotonic(), force or self._config.async_mode == "disabled"
        unfit: Exception | None = None
        state: Any = None
        try:
            try:
                with fail_together(self._group):
                    try:
                        state = self._state(contents, exported=last)
                    except (TypeError, ValueError) as error:  # at any later step, too
                        unfit = error
                    if not now and not unfit:
                        pinned = self._config.async_mode == "async_with_pinned_mem"
                        state = self._staged = Staged(state, pinned=pinned)
            except Exception as error:  # the states' owners may raise any kind of error
                self._staged = None
                raise self._failure(step, error) from error
            with fail_together(self._group):
                if unfit:
                    raise unfit
            if now:
                self._write(step, contents, state, begin)
            else:
                self._pending = step, self._thread.submit(self._write, step, contents, state, begin)
        except RuntimeError as error:
            if force or step == 1:
                raise
            logger.error("%s; training goes on", error)

    def _state(self, contents: str, exported: bool) -> dict[str, Any]:
        """Returns the contents of a checkpoint by key, with live tensors."""
        model = states_of.model_state(self._model_parts)
        owners = {} if contents == "model" else self._states | self._positions
        if both := sorted(model.keys() & owners.keys()):
            raise ValueError(f"the model has {both}, which are keys of other entries")
        state: dict[str, Any] = {}
        for name, value in model.items():
            if not torch.is_tensor(value):
                # What get_extra_state returns may have other items in the model that loads it.
                value = saved_values.undivided(value, name)
            elif contents == "model" and exported and value.is_floating_point():
                value = value.to(self._export_dtype or value.dtype)
            state[name] = value
        for key, owner in owners.items():
            try:
                state[key] = saved_values.divided(owner.state_dict(), key, strict=key == OPTIMIZER)
            except (TypeError, ValueError) as error:
                if key not in self._config.exclude_from_loading:
                    raise
                if key not in self._dropped_keys:
                    text = "Checkpoints are without %s, which is excluded from loading: %s"
                    logger.warning(text, key, error)
                    self._dropped_keys.add(key)
        return state

    @property
    def _export_dtype(self) -> torch.dtype | None:
        """The dtype to convert to. None for float32: the model stays as it is, as in torchtitan."""
        dtype = DTYPES[self._config.export_dtype]
        return None if dtype == torch.float32 else dtype

    def _write(self, step: int, contents: str, state: Any, begin: float) -> None:
        """Writes and publishes a checkpoint, on all ranks or none.

        Raises:
            RuntimeError: Saving failed. The message has reason and step. Written files are removed.
        """
        saving = files.saving_folder(self.folder, step)
        try:
            writer = Writer(saving)
            with fail_together(self._group):
                state = state.result() if isinstance(state, Staged) else state
            dcp_save(
                state,
                storage_writer=writer,
                planner=Planner(writer),
                process_group=self._group,
                no_dist=self._group is None,
            )
            every = all_gather_json(writer.fs.written, self._group, "listing a checkpoint's files")
            written = {name: file for of_rank in every for name, file in of_rank.items()}
            manifest = Manifest(step=step, contents=contents, files=written)
            with fail_together(self._group):
                if self._rank == 0:
                    if self._resumed_step is not None:
                        files.abandon(self.folder, self._resumed_step)
                    files.commit(self.folder, manifest)
            self._resumed_step = None
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            if self._rank == 0:
                shutil.rmtree(saving, ignore_errors=True)
            raise self._failure(step, error) from error
        self._done = step if contents == "full" else self._done
        self._refused.discard(step)
        if self._rank == 0:
            self._log("Saved", self.folder / f"step-{step}", contents, begin)
            self._remove_old()

    def _failure(self, step: int, error: BaseException) -> RuntimeError:
        reason = str(error) or type(error).__name__
        if isinstance(error, CheckpointException):  # each rank's reason, without its trace
            failures = error.failures.items()
            reason = "; ".join(f"rank {rank}: {problem}" for rank, (problem, _) in failures)
        return RuntimeError(
            f"saving the checkpoint of step {step} in {self.folder} failed: {reason}"
        )

    def _remove_old(self) -> None:
        """Removes all checkpoints except the newest `keep_latest_k`, in the background.

        They are renamed here: a later save of the same step must not be removed in their place.
        """
        if not (keep := self._config.keep_latest_k):
            return
        try:
            for removing in files.set_aside_old(self.folder, keep, self._refused):
                self._remover.submit(shutil.rmtree, removing, ignore_errors=True)
        except OSError as error:  # the next save tries again
            logger.warning("removing old checkpoints of %s: %s", self.folder, error)

    def maybe_wait_for_staging(self) -> None:
        """Makes the stream wait for the copy to host memory. Call it before the state changes.

        Only "async_with_pinned_mem" copies during training. The state changes in the optimizers'
        step, which may be in backward, and, if buffers are saved, in forward.
        """
        if self._enabled and self._staged is not None:
            self._staged.wait()
            self._staged = None

    def close(self) -> None:
        """Waits for a save and for removals in progress. Logs an error of the save."""
        if not self._enabled:
            return
        self._finish_pending(raises=False)
        self._thread.shutdown()
        self._remover.shutdown()
        if self._lock is not None:
            self._lock.close()

    def _finish_pending(self, *, raises: bool) -> None:
        """Waits for the save in progress. Logs its error, or raises an error of step 1."""
        self.maybe_wait_for_staging()
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        if error := future.exception():
            if raises and step == 1:
                raise error
            logger.error("%s%s", error, "; training goes on" if raises else "")

    # ---- loading ---------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Loads the newest usable checkpoint, or a step's. Returns whether there was a checkpoint.

        Every file is checked first. With -1, damaged checkpoints are skipped with a warning, and
        `initial_load_path`, if set, is loaded if there is no checkpoint at all. Step 0 is the model
        only. With a step, the next save renames later checkpoints to `abandoned-N`.

        Raises:
            ConfigError: The step's checkpoint, or every checkpoint, is missing or damaged. All
                ranks raise. The message says what is wrong.
            ValueError: The checkpoint does not fit. All ranks raise.
        """
        if not self._enabled:
            return False
        begin = time.monotonic()
        self._finish_pending(raises=True)
        self._done, self._delayed = None, False
        self._resumed_step = None if step == -1 else step
        chosen = self._choose(step)
        if chosen is None:
            return False
        checkpoint, model_only = chosen
        if self._rank == 0 and not (checkpoint / MANIFEST).exists():
            text = "%s has no %s: only the lengths of its files were checked"
            logger.warning(text, checkpoint, MANIFEST)
        self._load(checkpoint, model_only)
        if self._rank == 0:
            self._log("Loaded", checkpoint, "model" if model_only else "full", begin)
        return True

    def _choose(self, step: int) -> tuple[Path, bool] | None:
        """Returns the checkpoint that `load` loads, and whether only its model is loaded."""
        if step != -1:
            return self._checked(self.folder / f"step-{step}", step, step == 0)
        candidates = files.steps(self.folder)
        listed = [s for s in candidates if (self.folder / f"step-{s}" / MANIFEST).exists()]
        found = all_gather_json([candidates, listed], self._group, "choosing a checkpoint")
        candidates, listed = found[0]
        refused = []
        for candidate in candidates:
            checkpoint = self.folder / f"step-{candidate}"
            problem = self._problem(checkpoint, candidate, candidate == 0)
            if not problem and listed and candidate not in listed:
                problem = f"it lost its {MANIFEST}; checkpoint.load_step loads it"
            if not problem:
                return checkpoint, candidate == 0
            self._refused.add(candidate)
            refused.append(f"step {candidate}: {problem}")
            if self._rank == 0:
                logger.warning("Skipped %s: %s", checkpoint, problem)
        if refused:
            raise ConfigError(
                f"no checkpoint in {self.folder} can be loaded, and training from the beginning "
                f"would replace them, so it needs another folder; {'; '.join(refused)}"
            )
        if not self._config.initial_load_path:
            return None
        path, model_only = self._config.initial_load_path, self._config.initial_load_model_only
        return self._checked(Path(path), None, model_only)

    def _checked(self, checkpoint: Path, step: int | None, model_only: bool) -> tuple[Path, bool]:
        if problem := self._problem(checkpoint, step, model_only):
            raise ConfigError(f"{checkpoint} cannot be loaded: {problem}")
        return checkpoint, model_only

    def newest(self, until: int | None = None) -> int | None:
        """Returns the last step, up to `until`, whose checkpoint was not found damaged, or None."""
        if not self._enabled:
            return None
        usable = (s for s in files.steps(self.folder) if s not in self._refused)
        return next((step for step in usable if until is None or step <= until), None)

    def _problem(self, checkpoint: Path, step: int | None, model_only: bool) -> str:
        """Describes what is wrong, with the same text on all ranks. Each rank checks some files."""
        try:
            problems = files.problems(checkpoint, step, self._rank, self._ranks)
            if not model_only and files.contents_of(checkpoint) == "model":
                problems.append(
                    "it has the model only, from which a job can start by initial_load_path with "
                    "initial_load_model_only"
                )
        except (ValueError, OSError) as error:
            problems = [str(error)]
        try:
            raise_together("; ".join(problems) or None, self._group, ValueError)
        except ValueError as error:
            return str(error)
        return ""

    def _load(self, checkpoint: Path, model_only: bool) -> None:
        excluded = () if model_only else self._config.exclude_from_loading
        configured = states_of.settings(self._states)
        owners = {} if model_only else self._states | self._positions
        rest = {key: owner for key, owner in owners.items() if key not in excluded}
        optimizer = {OPTIMIZER: rest.pop(OPTIMIZER)} if OPTIMIZER in rest else {}
        reader = dcp.Reader(checkpoint)
        with as_config_error(), fail_together(self._group):
            metadata = reader.read_metadata()
            model = {} if MODEL in excluded else states_of.model_state(self._model_parts)
            model = states_of.model_to_load(model, metadata, checkpoint)
            live = {key: owner.state_dict() for key, owner in rest.items() if key in self._states}
            states = states_of.states_to_load(rest.keys(), live, metadata, checkpoint)
            if RNG in states:
                of_rank = self._positions[RNG].names
                states[RNG] = {name: None for name in states[RNG] if name in of_rank}
        if model:
            names = {*chain(*all_gather_json([*model], self._group, "comparing models"))}
            others = sorted(states_of.model_tensors(metadata).keys() - names)
            if self._rank == 0 and others:
                text = "%s has entries that the job's model lacks, and that are not loaded: %s"
                logger.warning(text, checkpoint, states_of.some(others))
        loaded = model | optimizer | states
        alone = self._group is None
        with as_config_error():  # such as groups that the checkpoint's settings do not fit
            dcp.load(loaded, storage_reader=reader, process_group=self._group, no_dist=alone)
        with fail_together(self._group):
            if model:
                states_of.set_model_state(self._model_parts, loaded)
            if optimizer and LR_SCHEDULER not in rest:
                # The loaded learning rates are of the saved schedule's step: set them again.
                schedulers = self._states[LR_SCHEDULER]
                schedulers.load_state_dict(schedulers.state_dict())
            for key, owner in rest.items():
                if key == TORCHFT and not loaded[key]:
                    continue  # a job without fault tolerance saves none
                fits = owner.load_state_dict(saved_values.restored(loaded[key]))
                if key == RNG and not fits:
                    # Equal on ranks with equal seeds, and different at each step.
                    seed_generators((torch.initial_seed() + files.step_of(checkpoint)) % 2**63)
                    if self._rank == 0:
                        text = "%s is of another layout of ranks: random numbers are seeded anew"
                        logger.warning(text, checkpoint)
        pairs = dict.fromkeys(zip(states_of.settings(self._states), configured, strict=False))
        replaced = [f"{here} instead of {asked}" for here, asked in pairs if here != asked]
        if self._rank == 0 and replaced:
            text = "The settings of %s are kept, not the configuration's: %s"
            logger.warning(text, checkpoint, states_of.some(replaced))
        optimizers = self._states[OPTIMIZER]
        if model and not optimizer and hasattr(optimizers, "refresh_masters"):
            optimizers.refresh_masters()  # those that exist are of the weights before

    def _log(self, did: str, checkpoint: Path, contents: str, begin: float) -> None:
        size = sum(path.stat().st_size for path in checkpoint.iterdir()) / 1e6
        seconds = time.monotonic() - begin
        logger.info("%s %s (%s, %.1f MB) in %.2f s", did, checkpoint, contents, size, seconds)
