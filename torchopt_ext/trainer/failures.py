"""torch's ``record``, with an error file that is complete or absent."""

import os
from functools import partial

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.distributed.elastic.multiprocessing.errors import record as torch_record

_FILE = "TORCHELASTIC_ERROR_FILE"


class _WholeFiles(ErrorHandler):
    """Writes the error next to the error file, and renames it when it is complete.

    When a rank fails, torchrun ends the other ranks and reads their error files
    (torch/distributed/elastic/multiprocessing/api.py). A truncated file raises in torchrun itself,
    which then restarts nothing.
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
