"""What eager PyTorch runs: the reference, and the fallback."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fxfuse.ops.activations import activation


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, act_args: Sequence[float] = ()) -> Tensor:
    return activation(act).function(F.linear(x, weight, bias), *act_args)
