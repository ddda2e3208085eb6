"""``GRPOTrainer`` with D3S's choice of rollouts and tokens between generation and update.

Each file overrides what TRL does at one place: :mod:`.generation` after TRL has made a generation batch, :mod:`.tokens`
while it computes a loss, and :mod:`.scoring` in its passes without gradient and its log. This one makes the
trainer, and routes each of TRL's calls for scores to the method for its caller.
"""

from __future__ import annotations

import warnings
from typing import Any

from accelerate import DistributedType
from torch import Tensor

from ...heads import read_head
from ...selection import Selection
from .config import D3SConfig
from .generation import ChoosesRollouts
from .head import OurHead, OverSets, check_head, d3s_head
from .sampling_options import require_one_turn
from .scoring import Call, Scores
from .surface import Watch


class D3STrainer(ChoosesRollouts):
    """``GRPOTrainer`` that trains on the rollouts and the tokens that D3S chooses. Same arguments, same methods.

    Rollouts: once a generation batch has its advantages, rollouts are chosen over all processes (``rollout_rule``), and
    each process gets the same number of rows. Dropped rollouts enter no later forward, and no pass for old or reference
    log-probabilities. The one exception is vLLM's correction, which needs the old ones before the choice.

    Tokens: exactly the top share by ``|advantage| * entropy``, or by another ``token_rule``, is kept, with the entropy
    of each training forward or of one pass before the update (``entropy_from``). The loss is TRL's own, of any type,
    over all valid tokens of the kept rollouts, but gradient flows only through the kept tokens. With
    ``loss_denominator="kept"`` the gradient is multiplied by all / kept, counted over the same tokens as TRL's
    denominator (``docs/trl.md`` has the table). The same holds for KL and the entropy bonus. The value of the loss and
    the clip metrics still cover all tokens. If the update skips dropped tokens, these count with a ratio of 1 and with
    the entropy of the earlier pass.

    With ``sampling_mask``, all these log-probabilities and entropies are over the set of tokens that a token was drawn
    from, which is recorded while transformers generates.

    Evaluation is TRL's.

    The metrics of :mod:`d3s_kernels.metrics` are logged too: for rollouts once per generation batch, for tokens once
    per micro-batch, both over all processes. If each sequence has its own threshold, the logged mean is over the main
    process's sequences. ``d3s/num_tokens_kept`` is the sum over the run so far.

    Raises:
        TypeError: ``args`` is not a :class:`D3SConfig`.
        ValueError: the LM head has an adapter or is no linear layer.
        UnknownTRL: in the first step, if a subclass overrides methods in a way that the selection does not support.

    Example:
        >>> from d3s_kernels.integrations.trl import D3SConfig, D3STrainer
        >>> args = D3SConfig("out", num_generations=8, rollouts_start=2, rollouts_end=8, max_steps=1, **elsewhere)
        >>> trainer = D3STrainer(model, reward, args, train_dataset=prompts, processing_class=tokenizer)
        >>> trainer.train().global_step
        1
    """

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: D3SConfig | None = None, *more: Any, **options: Any
    ) -> None:
        if args is not None and not isinstance(args, D3SConfig):
            raise TypeError(f"args: got a {type(args).__name__}; takes a D3SConfig")
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = D3SConfig(f"{name.split('/')[-1]}-D3S")
        super().__init__(model, reward_funcs, args, *more, **options)
        check_head(self.accelerator.unwrap_model(self.model))
        if args.sampling_mask:
            require_one_turn(self)
        if self._espo:
            self.importance_sampling_level = "token"  # what TRL sees: as_espo turns its token ratios into ESPO's
        self._selection, self._watch = Selection(args), Watch()
        self._warn_of_little_to_drop()

    def _warn_of_little_to_drop(self) -> None:
        """Warns once, on the main process, if small groups or small device batches leave little to drop."""
        everything, n, multiple = self.args.generation_batch_size, self.num_generations, self._multiple
        for when, progress in (("start", 0.0), ("end", 1.0)):
            asked, kept = self._selection.number_of_rollouts(progress, everything // n, n, multiple)
            given = getattr(self.args, f"rollouts_{when}")
            nothing = when == "start" and asked == everything and given != 1  # a share of 1 asks for all of them
            if self.accelerator.is_main_process and (nothing or kept > 1.25 * asked):
                warnings.warn(
                    f"rollouts_{when}: got {given}, but {kept} of {everything} rollouts are kept: a group has {n}, and "
                    f"their number is a multiple of processes x steps per generation, {multiple}. More num_generations,"
                    " or a larger per_device_train_batch_size with fewer gradient_accumulation_steps, drop more",
                    stacklevel=3,
                )
                return

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        self._watch.begin()
        loss: Tensor = super().training_step(*arguments, **options)
        self._watch.end(self)
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *more: Any, **options: Any
    ) -> Scores:
        trls = super()._get_per_token_logps_and_entropies

        def method(*arguments: Any, **changed: Any) -> Scores:
            scores: Scores = trls(*arguments, *more, **{**options, **changed})
            return scores

        module = model.model if isinstance(model, OverSets) else model
        of_model = read_head(self.accelerator.unwrap_model(module))  # read in each call, since an adapter may be new
        call, inputs = Call(method, model, input_ids, attention_mask, logits_to_keep), self._loss_inputs
        head = OurHead(of_model, adds_to_gradients=inputs is not None and self._alone)
        with d3s_head(head):
            if inputs is not None:
                return self._score_for_loss(head, call, inputs)
            if self._passes is not None and self._passes.names:
                return self._score_before_rewards(call, self._passes)
            return call.scores()

    @property
    def _alone(self) -> bool:
        """Whether nothing reads a gradient before the optimizer: no reducer, no shards, no scaler."""
        return self.accelerator.distributed_type == DistributedType.NO and self.accelerator.scaler is None
