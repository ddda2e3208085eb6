"""NeMo-RL: Megatron's workers make no logits in an update with ``D3SLoss``. ``d3s_nemo_rl.py`` says how to use it.

The signatures were read at 7ea279a, 2026-08-22.
"""

from typing import Any

import ray
from d3s_nemo_rl import require
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from d3s_kernels.integrations.megatron import LMHead


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class D3SMegatronPolicyWorker(MegatronPolicyWorkerImpl):
    head: LMHead | None = None

    def train(self, data: Any, loss_fn: Any, **named: Any) -> dict[str, Any]:
        """NeMo-RL's update. ValueError: a loss that needs logits, or an option whose other losses need them."""
        require(hasattr(loss_fn, "reading"), "loss_fn", type(loss_fn).__name__, "a D3SLoss")
        draft, quantised = (self.cfg.get("draft") or {}).get("enabled", False), self.cfg.get("quant_cfg")
        require(not draft, "draft.enabled", draft, "false: the draft model learns from logits")
        require(quantised is None, "quant_cfg", quantised, "null: it needs a worker of its own")
        self.head = self.head or LMHead(self.model)
        with loss_fn.reading(self.head, self.model):
            return super().train(data, loss_fn, **named)
