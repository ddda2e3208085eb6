"""The plugin that verl loads in each of its processes (entry point ``verl.plugins``): registers our names."""

from __future__ import annotations

import importlib
import importlib.util
import warnings


def _register() -> None:
    names = {
        "loss": "actor.policy_loss.loss_mode=d3s",
        "espo": "actor.policy_loss.loss_mode=espo",
        "head": "model.fused_kernel_options.impl_backend=d3s",
        "engine": "trainer.v1.d3s_sync.sampling_mask_field",
    }
    if importlib.util.find_spec("transfer_queue"):  # verl's V1 trainers cannot be imported without it
        names["trainer"] = "trainer.v1.trainer_mode=d3s_sync"
    for module, setting in names.items():
        try:
            importlib.import_module(f"{__package__}.{module}")
        except Exception as error:  # verl would hide it
            warnings.warn(
                f"d3s_kernels: {setting} is not available: {__package__}.{module} could not be imported: {error!r}",
                RuntimeWarning,
                stacklevel=2,
            )


_register()
