"""What to say when a collective fails."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Says which collective failed when a rank of the group died or is late.

    Raises:
        RuntimeError: torch.distributed raised one; that one is its cause.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what}: a rank of the group died, is late or does something else: {error}"
        ) from error
