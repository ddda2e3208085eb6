"""The ranks of all tests here have imported Megatron before they are started."""

from ranks import PRELOADED

PRELOADED += ["megatron.core.models.gpt.gpt_layer_specs", "megatron.core.distributed"]
