"""fxfuse: finds matmul+add, linear+activation and gated MLP patterns in PyTorch models, and fuses them.

model = fxfuse.optimize(model)
print(fxfuse.report(model))
"""

from fxfuse.api import graphs, optimize, refresh, report, restore, rewrite, tune
from fxfuse.drawing import draw
from fxfuse.options import Options
from fxfuse.rule import Rule

__all__ = ["Options", "Rule", "draw", "graphs", "optimize", "refresh", "report", "restore", "rewrite", "tune"]
__version__ = "0.1.0"
