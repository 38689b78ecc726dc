"""The error scales of operators that amplify the errors of their operands, to first order, for ``fxfuse.numerics``.

Each takes the scales of the operands and then the operator's own arguments; it returns the scale of the errors of its
result, and what a row of the result is measured by. None: a form that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Scale = tuple[Tensor, Tensor]
Rule = Callable[..., Scale | None]


def _of_softmax(scales: Any, input: Tensor, dim: int, *_: Any, **__: Any) -> Scale:
    """p = softmax(s), and dp = p (ds - sum(p ds))."""
    p = input.softmax(dim)
    return p * (scales[0] + (p * scales[0]).sum(dim, keepdim=True)), p


def _of_layer_norm(
    scales: Any, input: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Scale:
    """y = x^ w + b with x^ = (x - mean) / sigma, and dx^ = (dx - mean(dx) - x^ mean(x^ dx)) / sigma."""
    dims, scale = tuple(range(-len(shape), 0)), scales[0]
    sigma = (input.var(dims, correction=0, keepdim=True) + eps).sqrt()
    hat = ((input - input.mean(dims, keepdim=True)) / sigma).abs()
    means = scale.mean(dims, keepdim=True) + hat * (hat * scale).mean(dims, keepdim=True)
    found = (scale + means) / sigma * (1.0 if weight is None else weight.abs())
    y = hat if weight is None else hat * weight.abs()
    return (found if bias is None else found + bias.abs()), y


def _of_attention(
    scales: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Scale | None:
    """y = p v with p = softmax(s) and s = scale q k: an error of s moves y by p (ds - sum(p ds)) v."""
    if enable_gqa or dropout_p:
        return None
    by = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = scales[:3]
    s = query @ key.mT * by
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(), -torch.inf)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype is torch.bool else s + attn_mask
    p = s.softmax(-1).nan_to_num()
    ds = p * ((q @ key.abs().mT + query.abs() @ k.mT) * abs(by))
    found = p @ v + ds @ value.abs() + ds.sum(-1, keepdim=True) * (p @ value.abs())
    return found, p @ value


AMPLIFYING: dict[str, Rule] = {
    "softmax": _of_softmax,
    "layer_norm": _of_layer_norm,
    "layernorm": _of_layer_norm,
    "scaled_dot_product_attention": _of_attention,
}
