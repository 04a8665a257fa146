"""`--module=config --config=llama3`: torchtitan's debug model, optimized by torchopt_ext."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from torchopt_ext.integrations.torchtitan_0_3 import use_torchopt_ext


def llama3() -> Trainer.Config:
    config = llama3_debugmodel()
    spec = config.model_spec
    for layer in spec.model.layers:  # flex attention, the default, has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    config.training.seq_len, config.training.local_batch_size = 128, 4
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    # The only line for torchopt_ext: everything else is torchtitan's.
    return use_torchopt_ext(config, deferred_clipping=True)
