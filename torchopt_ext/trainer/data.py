"""Data sets by name, and loaders that give each data-parallel rank its share of a data set."""

import dataclasses
import hashlib
import logging
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)

from torchopt_ext.trainer.checkpoint_states import generator_states, set_generator_states
from torchopt_ext.trainer.config import ConfigError, JobConfig, as_config_error
from torchopt_ext.trainer.distributed import seed_generators
from torchopt_ext.trainer.extras import Registry, import_extra
from torchopt_ext.trainer.windows import Batch, FileBytes, TokenWindows

__all__ = ["BuildDataset", "build_dataloader", "register_dataset"]

logger = logging.getLogger(__name__)


class BuildDataset(Protocol):
    """Builds a data set for a job.

    A torch Dataset with a length must be the same on every rank; its samples are shuffled and
    distributed here. An IterableDataset must yield only this rank's samples, in their final order
    and the same number on each rank; each `iter` of it is one pass. A sample is ({"input": int64
    [seq_len]}, labels int64 [seq_len]), or a `collate_fn` of the data set makes batches of samples.
    """

    def __call__(
        self, *, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: JobConfig
    ) -> Dataset[Any]: ...


_DATASETS = Registry[BuildDataset]("data set", "register_dataset")


def register_dataset(name: str, build: BuildDataset) -> None:
    """Registers a data set under a new name for `training.dataset` and `validation.dataset`."""
    _DATASETS.add(name, build)


def build_text(
    *, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: JobConfig
) -> Dataset[Any]:
    """Builds the data set "text": all files under `training.dataset_path`, one after another.

    Without a tokenizer, tokens are the files' bytes, which stay on disk. With a tokenizer (a method
    `encode` from text to numbers), each rank encodes all files (UTF-8) at the start, and holds 4
    bytes per token.
    """
    training = job_config.training
    if not training.dataset_path:
        raise ConfigError("data set 'text' reads the files under dataset_path, which is not set")
    path = Path(training.dataset_path)
    if not path.exists():
        raise ConfigError(f"dataset_path is {path}, which does not exist")
    data = FileBytes(path)
    if tokenizer is None:
        return TokenWindows(data, training.seq_len)
    tokens = [torch.empty(0, dtype=torch.int32)]
    for file in data.paths:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"data set 'text' reads UTF-8, but {file} is not: {error}") from error
        tokens.append(torch.tensor(tokenizer.encode(text), dtype=torch.int32))
    return TokenWindows(torch.cat(tokens), training.seq_len)


register_dataset("text", build_text)


Key = tuple[int, int, int]
"""The key of a sample: seed and epoch of the order that it is in, and the sample's index."""


class KeyedSamples(Dataset[Any]):
    """A data set's samples by key. In a worker process each sample has its own random numbers.

    The random numbers depend only on the key, because a worker does not know which samples other
    workers, or workers before a restart, have made. In the training process samples draw from the
    generators that checkpoints hold.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """Returns a batch's samples. A data set with `__getitems__` is seeded by the first key."""
        together = getattr(self._dataset, "__getitems__", None)
        if together is None:
            return [self[key] for key in keys]
        _seed_worker(keys[0])
        samples: list[Any] = together([index for _, _, index in keys])
        return samples

    def __getitem__(self, key: Key) -> Any:
        _seed_worker(key)
        return self._dataset[key[2]]


def _seed_worker(key: Key) -> None:
    if get_worker_info() is None:
        return
    # Every sample needs a seed, and _hashed takes six times as long.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    # torch.manual_seed takes 200 us, because it seeds devices that a worker does not use.
    seed_generators(seed, torch.default_generator.manual_seed)


def _hashed(*numbers: int) -> int:
    """Returns a seed of 63 bits. Neighboring numbers give unrelated seeds."""
    return random.Random(" ".join(map(str, numbers))).getrandbits(63)  # by SHA-512


@dataclasses.dataclass(eq=False)
class ShuffledBatches(Sampler[list[Key]]):
    """The batches of one rank, from a position in a sequence of shuffled epochs.

    The position counts the samples of all ranks together, so it is the same on every rank. A job
    that resumes with another number of ranks or another batch size sees no sample of an epoch
    twice. An epoch's order depends on the seed and the epoch's number. Samples at an epoch's end
    that are too few for a batch on every rank are not used. 0 epochs are endless.
    """

    size: int
    batch_size: int
    dp_rank: int
    dp_world_size: int
    seed: int
    epochs: int
    epoch: int = 0
    samples: int = 0

    def __post_init__(self) -> None:
        self._together = self.batch_size * self.dp_world_size

    def __iter__(self) -> Iterator[list[Key]]:
        """Yields the keys of the samples in each batch, from the position on."""
        epoch, samples = self._whole(self.epoch, self.samples)
        while not self.epochs or epoch < self.epochs:
            generator = torch.Generator().manual_seed(_hashed(self.seed, epoch))
            order = torch.randperm(self.size, generator=generator, dtype=torch.int32)
            ordered = epoch
            while epoch == ordered:
                start = samples + self.dp_rank * self.batch_size
                batch = order[start : start + self.batch_size].tolist()
                yield [(self.seed, epoch, index) for index in batch]
                epoch, samples = self._whole(epoch, samples + self._together)

    def advance(self) -> None:
        """Moves the position past one batch of every rank."""
        epoch, samples = self._whole(self.epoch, self.samples)
        if epoch != self.epoch:
            logger.info("Epoch %d of the training data begins", epoch + 1)
        self.epoch, self.samples = epoch, samples + self._together

    def _whole(self, epoch: int, samples: int) -> tuple[int, int]:
        """Returns the next batch's position: the next epoch's start if too few samples are left."""
        return (epoch, samples) if samples + self._together <= self.size else (epoch + 1, 0)

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("seed", "epoch", "samples", "size")}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Moves to a saved position, in the order of the saved seed."""
        if state_dict["size"] != self.size:
            logger.warning(
                f"The data set had {state_dict['size']} samples when the checkpoint was saved, and "
                f"has {self.size} now: epoch {state_dict['epoch'] + 1} continues in another order"
            )
        for name in ("seed", "epoch", "samples"):
            setattr(self, name, state_dict[name])


class ShuffledDataLoader:
    """Loads shuffled batches, and tracks the position after the last batch that was taken.

    Iteration continues from the position, also from one that is loaded during it. (torchdata's
    loader would save how many batches this rank has taken, which is of no use to other ranks.)
    """

    same_position_on_all_ranks = True

    def __init__(self, dataset: Dataset[Any], batches: ShuffledBatches, options: Any) -> None:
        self.dataset, self._batches, self._moved = dataset, batches, False
        self._loader = DataLoader(KeyedSamples(dataset), batch_sampler=batches, **options)

    def __iter__(self) -> Iterator[Batch]:
        ended = False
        while not ended:
            self._moved = False
            for batch in self._loader:
                if self._moved:
                    break  # workers read this batch at the old position
                self._batches.advance()  # workers are ahead of this position
                yield batch
            ended = not self._moved

    def state_dict(self) -> dict[str, Any]:
        crc32 = getattr(self.dataset, "crc32", None)
        return {"position": self._batches.state_dict(), "crc32": crc32}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "position" not in state_dict:
            raise ValueError(
                f"the data loader's state has {sorted(state_dict)}, expected 'position': it was "
                "saved by a job with another kind of data set"
            )
        if state_dict.get("crc32", crc32 := getattr(self.dataset, "crc32", None)) != crc32:
            logger.warning(
                "The data set has other bytes, or its files another order, than in the checkpoint: "
                "samples may come twice in an epoch, or never"
            )
        self._batches.load_state_dict(state_dict["position"])
        self._moved = True


class CountedStream(IterableDataset[Any]):
    """Gives the iterators of a data set without a state a state: the number of samples taken.

    StatefulDataLoader's own count of batches is too high after it has resumed from a state.
    """

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._dataset)
        return samples if isinstance(samples, Stateful) else _Counted(samples)


class _Counted(Iterator[Any]):
    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples, self._taken = samples, 0

    def __next__(self) -> Any:
        sample = next(self._samples)
        self._taken += 1
        return sample

    def state_dict(self) -> dict[str, int]:
        return {"taken": self._taken}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Skips the samples that were taken. The iterator must be at its beginning."""
        self._taken = sum(1 for _ in islice(self._samples, state_dict["taken"]))


class StreamDataLoader:
    """torchdata's StatefulDataLoader, with a state per data-parallel rank as torchtitan's.

    Iteration continues from the saved position to the end of the last pass; with 0 epochs it is
    endless, unless the data set is empty. Workers are seeded when they start, by seed, rank and
    pass, through the `generator` in `options`. Persistent workers start once.
    """

    same_position_on_all_ranks = False

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        *,
        dp_rank: int,
        dp_world_size: int,
        options: Any,
        seed: int,
        epochs: int,
    ) -> None:
        torchdata = import_extra("torchdata.stateful_dataloader", "a data set without a length")
        self.dataset = dataset
        stream = dataset if isinstance(dataset, Stateful) else CountedStream(dataset)
        self._loader = torchdata.StatefulDataLoader(stream, batch_size, drop_last=True, **options)
        self._key, self._dp_world_size = f"dp_rank_{dp_rank}", dp_world_size
        self._generator, self._seeds = options["generator"], (seed, dp_rank)
        self._epochs, self._passes, self._resumes = epochs, 0, False

    def __iter__(self) -> Iterator[Batch]:
        resumes, self._resumes = self._resumes, False
        while not self._epochs or self._passes < self._epochs:
            self._generator.manual_seed(_hashed(*self._seeds, self._passes))
            # A data set without a state is read again up to the position, which may draw random
            # numbers. The checkpoint's random numbers are for the samples that follow.
            before = generator_states() if resumes else None
            batches = iter(self._loader)
            if before:
                set_generator_states(before)
            batch = None
            for batch in batches:
                yield batch
            if batch is None and not resumes:
                return
            self._passes += 1
            resumes = False

    def state_dict(self) -> dict[str, Any]:
        return {
            self._key: self._loader.state_dict(),
            "world_size": self._dp_world_size,
            "passes": self._passes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._key not in state_dict or state_dict["world_size"] != self._dp_world_size:
            raise ValueError(
                f"the data loader's state has {sorted(state_dict)} of "
                f"{state_dict.get('world_size', 'unknown')} data-parallel ranks, expected "
                f"{self._key!r} of {self._dp_world_size}: a stream of samples cannot be divided "
                "anew; resume with as many ranks, or exclude 'dataloader' from loading"
            )
        if not isinstance(self.dataset, Stateful) and not _has_iterator(state_dict[self._key]):
            raise ValueError(
                "the data loader's state does not say how many samples were taken, but neither the "
                "data set nor its iterator has a state: exclude 'dataloader' from loading"
            )
        self._loader.load_state_dict(state_dict[self._key])
        self._passes, self._resumes = state_dict["passes"], True


def _has_iterator(state: Any) -> bool:
    """Returns whether a StatefulDataLoader's state holds an iterator's state, in any worker."""
    if not isinstance(state, Mapping):
        return False
    return state.get("dataset_iter_state") is not None or any(map(_has_iterator, state.values()))


def build_dataloader(
    *, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: JobConfig
) -> ShuffledDataLoader | StreamDataLoader:
    """Builds a resumable loader of `training.dataset` for one data-parallel rank.

    A batch is ({"input": int64 [batch_size, seq_len]}, labels int64 [batch_size, seq_len]). All
    ranks get different samples, and the same number of batches. They end after `training.epochs`
    epochs, or never if it is 0. The order depends on `training.seed` (0 if unset).

    Raises:
        ConfigError: The data set is not registered or has too few samples for one batch on each
            rank, or `dataloader` has settings that exclude each other.
    """
    training = job_config.training
    dataset = _DATASETS.get(training.dataset)(
        dp_world_size=dp_world_size, dp_rank=dp_rank, tokenizer=tokenizer, job_config=job_config
    )
    options = {
        **dataclasses.asdict(training.dataloader),
        "collate_fn": getattr(dataset, "collate_fn", default_collate),
        # Without it, starting an iteration would draw from the generator of the model's dropout.
        "generator": torch.Generator(),
    }
    batch_size, order = training.batch_size, {"seed": training.seed or 0, "epochs": training.epochs}
    ranks = {"dp_rank": dp_rank, "dp_world_size": dp_world_size}
    if not isinstance(dataset, IterableDataset):
        size, needed = len(dataset), batch_size * dp_world_size  # type: ignore[arg-type]
        if size < needed:
            raise ConfigError(
                f"data set {training.dataset!r} has {size} samples of seq_len {training.seq_len}, "
                f"expected at least {needed}: a batch of {batch_size} on each of {dp_world_size} "
                "ranks"
            )
        batches = ShuffledBatches(size, batch_size=batch_size, **ranks, **order)
    with as_config_error():  # torch knows which settings of workers go together
        if isinstance(dataset, IterableDataset):
            return StreamDataLoader(dataset, batch_size, options=options, **ranks, **order)
        return ShuffledDataLoader(dataset, batches, options)
