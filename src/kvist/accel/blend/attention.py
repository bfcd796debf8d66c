"""Attention of some rows of a sequence to all of it, causal by true position.

A kernel's own causal mask takes the rows for the last of the sequence; scattered rows would see
their future. Here row i sees key j exactly if `j <= positions[i]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20  # of a mask at once: bounds memory, whatever the prompt's length
_MAX_CHUNK_ROWS = 128  # more would compute more of what the mask then hides


def attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Attention of rows at `positions` to a whole sequence.

    Args:
        q: `[n, heads, head_dim]`.
        keys: `[kv_heads, tokens, head_dim]`; row j stands at position j.
        values: as `keys`.
        positions: `[n]` int64, ascending, each below `tokens`.
        scale: multiplies query · key.

    Returns:
        `[n, heads * head_dim]`.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    rows, heads, head_dim = q.shape
    tokens = keys.shape[1]
    grouped = heads != keys.shape[0]
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    if not rows:
        return out.view(0, heads * head_dim)
    if rows == tokens:  # ascending and below `tokens`: every position, in order
        whole = scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None],
            is_causal=True, scale=scale, enable_gqa=grouped,
        )  # fmt: skip
        return whole[0].transpose(0, 1).reshape(rows, heads * head_dim)
    step = max(1, min(_MAX_CHUNK_ROWS, _CHUNK_ELEMENTS // tokens))
    ends = positions[step - 1 :: step].tolist()  # one copy from the device, not one a chunk
    places = torch.arange(tokens, device=q.device)
    for chunk, start in enumerate(range(0, rows, step)):
        stop = min(start + step, rows)
        seen = ends[chunk] + 1 if chunk < len(ends) else tokens
        mask = places[None, :seen] <= positions[start:stop, None]
        part = scaled_dot_product_attention(
            q[start:stop].transpose(0, 1)[None], keys[None, :, :seen], values[None, :, :seen],
            attn_mask=mask, scale=scale, enable_gqa=grouped,
        )  # fmt: skip
        out[start:stop] = part[0].transpose(0, 1)
    return out.view(rows, heads * head_dim)
