"""The fusions, in the order in which they run. One file is one fusion; ``DEFAULT`` is the whole pipeline."""

if __name__ != "fxfuse.passes":
    raise ImportError("this folder is imported as fxfuse.passes; run `pip install -e .` in the checkout once")

from fxfuse.passes import clean_up as _clean_up
from fxfuse.passes import gated_linear as _gated_linear
from fxfuse.passes import linear_act as _linear_act
from fxfuse.passes import lower_linear as _lower_linear
from fxfuse.passes import matmul_add as _matmul_add
from fxfuse.passes import spelled_activation as _spelled_activation

from fxfuse.rule import Rule

DEFAULT: tuple[Rule, ...] = (
    *_clean_up.RULES,  # takes away what stands between the parts of a pattern
    *_spelled_activation.RULES,  # activations written out by hand become the op that they compute
    *_matmul_add.RULES,  # products with a bias become linears, which the next passes look for
    *_clean_up.HOIST,  # an activation after a view of a linear moves next to it
    *_gated_linear.RULES,  # before linear_act, which would take the gate's activation alone
    *_linear_act.RULES,
    *_lower_linear.RULES,  # what is still a plain linear
    *_clean_up.RULES,  # transposes that the rewrites left back to back
)
