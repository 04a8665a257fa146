"""torchtitan's command line. Without an accelerator a shim lets its Trainer run on a CPU."""

import torch

if not torch.accelerator.is_available():
    import cpu_shim  # in tests/distributed/torchtitan_cpu

    cpu_shim.install()

from torchtitan.train import main

if __name__ == "__main__":
    main()
