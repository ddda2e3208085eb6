"""Reads the sampling masks of verl's rows, and aligns them with the logits of a micro-batch.

verl has no field of its own for sampling masks. A rollout can store them under any name. With verl's V1 trainers, they
are in a row's ``extra_fields``. With verl's older ray trainer and with verl's forks, they are in ``non_tensor_batch``
or ``batch`` of a ``DataProto``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...support.sampling_mask import SamplingMask, offsets_of

NOTE = "d3s_sampling_mask"
"""The key of the batch entry that makes verl's actor use sampling masks: ``batch.meta_info[NOTE] = field``."""


def sampling_mask_of(data: Any, field: str, *, width: int | None = None) -> tuple[SamplingMask, Tensor]:
    """Returns, for each position of a micro-batch's logits, the support of the token that the position predicts.

    Logits predict the next token, so the supports of a response begin at the last token of its prompt. Positions that
    predict a prompt token have no support. A row whose ``response_mask`` is all 0 is one of verl's padding rows: a copy
    of a real row, but with another response. The mask leaves out padding rows, and their lists of supports are not
    read.

    Args:
        data: a micro-batch (TensorDict), as verl passes it to its engines.
        field: the name of the field that has the rows' supports, or the key of the supports in ``extra_fields``. The
            field has either a list of ids for each response token, or one integer tensor ``[B, T, K]`` for all rows,
            padded with -1.
        width: the sequence length of right-padded logits ``[B, width, V]``. None for packed logits ``[n, V]``, as with
            ``use_remove_padding``.

    Returns:
        The ops' arguments ``sampling_mask=`` and ``mask=``, on the device of ``input_ids``. They are for ``n`` rows of
        packed logits, or for ``B * width`` rows of padded logits.

    Raises:
        ValueError: there is no such field; the number of a row's supports differs from the number of the row's response
            tokens.

    Example:
        >>> kept, mask = sampling_mask_of(micro_batch, "sampling_mask")  # doctest: +SKIP
        >>> d3s.logprob_entropy(logits, labels, mask=mask, sampling_mask=kept)  # doctest: +SKIP
    """
    device, valid = data["input_ids"].device, data["response_mask"]
    if valid.is_nested:
        counted = [bool(row.any()) for row in valid.values().cpu().split(valid.offsets().diff().tolist())]
    else:
        counted = valid.bool().any(dim=1).tolist()
    lengths = response_lengths(data).tolist()
    values = field_of(data, field)
    if isinstance(values, Tensor):
        if values.is_nested or values.dim() != 3 or len(values) != len(lengths) or values.shape[1] < max(lengths):
            shape = "a nested tensor" if values.is_nested else f"shape {list(values.shape)}"
            raise ValueError(f"{field}: got {shape}; takes [{len(lengths)}, T, K] with T of at least {max(lengths)}")
        tokens = [row * values.shape[1] + torch.arange(length) for row, length in enumerate(lengths)]
        supports = SamplingMask.from_padded(values).index_select(torch.cat(tokens).to(values.device)).to(device)
    else:
        of_rows: list[Sequence[int]] = []
        for row, (of_row, length) in enumerate(zip(values, lengths, strict=True)):
            if counted[row] and (of_row is None or len(of_row) != length):
                raise wrong_number(field, row, 0 if of_row is None else len(of_row), length)
            of_rows += of_row if counted[row] else [[]] * length
        supports = SamplingMask.from_lists(of_rows).to(device)

    places = places_of_responses(data, width)
    rows = len(data["input_ids"].values()) if width is None else width * len(lengths)
    counts = torch.zeros(rows, dtype=torch.int64, device=device).index_copy(0, places, supports.offsets.diff().long())
    in_response = torch.tensor(counted).repeat_interleave(torch.tensor(lengths)).to(device)
    mask = torch.zeros(rows, dtype=torch.bool, device=device).index_copy(0, places, in_response)
    return SamplingMask(supports.token_ids, offsets_of(counts)), mask


def field_of(data: Any, field: str) -> Any:
    """Returns the rows' supports: a tensor, or a list with one entry for each row, where None stands for a row without
    supports.
    """
    if field in data:
        values = data[field]
        return values if isinstance(values, Tensor) else list(values)
    if "extra_fields" in data:
        return [row.get(field) for row in data["extra_fields"]]
    raise ValueError(f"{field}: is no field of the rows, which have {', '.join(sorted(data.keys()))}")


def response_lengths(data: Any) -> Tensor:
    """Returns the number of tokens of each response, ``[rows]``, computed as in verl's ``no_padding_2_padding``."""
    if data["responses"].is_nested:
        lengths: Tensor = data["responses"].offsets().diff()
    else:
        lengths = data["attention_mask"][:, data["prompts"].shape[1] :].sum(dim=1)
    return lengths


def flat_responses(data: Any, values: Tensor) -> Tensor:
    """Returns the values of all response tokens in one dimension, row after row. ``values`` has one value for each
    token: either as a nested tensor, or as ``[B, T]``.
    """
    if values.is_nested:
        flat: Tensor = values.values()
    else:
        flat = values[torch.arange(values.shape[1], device=values.device) < response_lengths(data).unsqueeze(1)]
    return flat


def places_of_responses(data: Any, width: int | None = None) -> Tensor:
    """Returns, for each response token, the int64 index of the row of logits that predicts this token. The row belongs
    to the position before the token. ``width`` is as in :func:`sampling_mask_of`. There is no host sync if the
    responses are nested tensors.
    """
    offsets, lengths = data["input_ids"].offsets(), response_lengths(data)
    starts = offsets[:-1] if width is None else torch.arange(len(lengths), device=offsets.device) * width
    before = lengths.cumsum(0) - lengths  # the number of tokens in all earlier responses
    tokens = len(data["responses"].values()) if data["responses"].is_nested else int(lengths.sum())
    shift = starts + offsets.diff() - lengths - 1 - before
    places: Tensor = torch.arange(tokens, device=offsets.device) + shift.repeat_interleave(lengths, output_size=tokens)
    return places


def wrong_number(field: str, row: Any, given: int, takes: int) -> ValueError:
    return ValueError(
        f"{field}: got {given} supports in row {row}; takes {takes}, one for each token of its response, with an empty "
        "one for a token that the model has not drawn"
    )
