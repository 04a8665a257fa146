"""torch's ``record``, which leaves its error file whole or not at all."""

import os
from functools import partial

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.distributed.elastic.multiprocessing.errors import record as torch_record

_FILE = "TORCHELASTIC_ERROR_FILE"


class _WholeFiles(ErrorHandler):
    """Writes the error beside the error file and renames it.

    When a rank fails, torchrun ends the others and reads their error files
    (torch/distributed/elastic/multiprocessing/api.py). One that is cut off there raises in torchrun
    itself, which then restarts nothing.
    """

    def record_exception(self, e: BaseException) -> None:
        file = os.environ.get(_FILE)
        if file is None:
            super().record_exception(e)
            return
        os.environ[_FILE] = f"{file}.part"
        try:
            super().record_exception(e)
            os.replace(f"{file}.part", file)
        finally:
            os.environ[_FILE] = file


record = partial(torch_record, error_handler=_WholeFiles())
