"""torchtitan's command line; without an accelerator with what lets its Trainer run on a CPU."""

import torch

if not torch.accelerator.is_available():
    import cpu_shim  # of tests/distributed/torchtitan_cpu

    cpu_shim.install()

from torchtitan.train import main

if __name__ == "__main__":
    main()
