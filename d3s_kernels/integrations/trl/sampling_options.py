"""Checks that the trainer can record the sets that tokens are drawn from, with the given sampling options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl import GRPOConfig, GRPOTrainer

# Options of transformers' generation that cut tokens, each with the values that cut none.
_CUTS: dict[str, tuple[Any, ...]] = {
    "top_k": (None, 0), "top_p": (None, 1.0), "min_p": (None, 0.0), "top_h": (None, 1.0), "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0, 1.0), "eta_cutoff": (None, 0.0, 1.0),
}  # fmt: skip
# Other options in generation_kwargs that change no probability.
_HARMLESS = {
    "max_new_tokens", "max_time", "eos_token_id", "pad_token_id", "bos_token_id", "stop_strings", "use_cache",
    "cache_implementation", "cache_config", "prefill_chunk_size", "compile_config",
}  # fmt: skip


def require_sampled_sets(args: GRPOConfig) -> None:
    """Raises a ValueError if generation with these options has no sets, or sets that cannot be recorded."""
    refused = {
        "use_vllm": (False, "vLLM returns the sets from 0.28 on, but TRL hands on ids and log-probabilities alone"),
        "use_transformers_continuous_batching": (False, "generate_batch takes no processors, which record the sets"),
        "repetition_penalty": (1.0, "it changes scores, and the sets do not record that"),
    }
    for name, (takes, reason) in refused.items():
        if (found := getattr(args, name)) != takes:
            raise ValueError(f"{name}: got {found!r} with sampling_mask; takes {takes!r}: {reason}")
    given: dict[str, Any] = args.generation_kwargs or {}
    for name in given:
        if name not in _CUTS and name not in _HARMLESS:
            raise ValueError(
                f"generation_kwargs: got {name!r} with sampling_mask; takes {', '.join(sorted(_CUTS))}, which leave "
                f"tokens out, and what changes no probability: {', '.join(sorted(_HARMLESS))}"
            )
    sampling = {name: given.get(name, getattr(args, name, None)) for name in _CUTS}
    if all(value in _CUTS[name] for name, value in sampling.items()):
        raise ValueError(
            f"sampling_mask: got True with top_p {args.top_p}, top_k {args.top_k} and min_p {args.min_p}, which leave "
            "no token out; takes top_p below 1, top_k above 0 or min_p above 0"
        )


def require_one_turn(trainer: GRPOTrainer) -> None:
    """Raises a ValueError if completions have tokens that were not drawn in one call of ``generate``."""
    for name in ("tools", "environment_factories", "rollout_func"):
        if getattr(trainer, name, None):
            raise ValueError(
                f"{name.replace('factories', 'factory')}: got one with sampling_mask; takes none: tokens of other "
                "turns and of tools have no set"
            )
