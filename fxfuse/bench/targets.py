"""What ``TARGET`` on the command line means.

A built-in name, ``hf:NAME`` or ``timm:NAME`` (``fxfuse.bench.libraries``), ``package.module:callable`` or
``file.py:callable``.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fxfuse import tuning
from fxfuse.bench import libraries
from fxfuse.bench.models import BUILT_IN
from fxfuse.capture.tree import ROOT
from fxfuse.errors import FxfuseError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class BadTarget(FxfuseError, ValueError):
    """TARGET cannot be loaded, or what it returns is nothing to optimize."""


@dataclass(frozen=True)
class Target:
    """A model in eval mode with its example call."""

    name: str
    model: nn.Module
    args: tuple[Any, ...] | None
    """None: the target returned a model alone."""
    kwargs: dict[str, Any]

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example call; raises BadTarget where the target gave none."""
        if self.args is None:
            raise BadTarget(
                f"{self.name} returned a model without example inputs, and there is nothing to time without them. "
                "Return (model, args) or (model, args, kwargs)."
            )
        return self.args, self.kwargs

    def with_rows(self, rows: int, option: str) -> Target:
        """The same model called with one tensor like the example's, of so many rows.

        Raises BadTarget, which names the command line's ``option``, for a model of other arguments.
        """
        args, kwargs = self.example()
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
            raise BadTarget(
                f"{self.name}: {option} is for models of one floating-point tensor [..., rows, columns]. "
                "Without it, the sizes of the target's own example are measured."
            )
        return replace(self, args=(tuning.random([1] * (x.dim() - 2) + [rows, x.shape[-1]], like=x),))

    def in_float64(self) -> Target:
        """A copy of the model and of its example, in float64."""

        def wide(t: Tensor) -> Tensor:
            return t.clone().double() if t.is_floating_point() else t.clone()

        args, kwargs = tree_map_only(Tensor, wide, self.example())
        return replace(self, model=copy.deepcopy(self.model).double(), args=args, kwargs=kwargs)

    @property
    def tensors(self) -> list[Tensor]:
        """The model's parameters and the example's tensors."""
        return [*self.model.parameters(), *(leaf for leaf in tree_leaves(self.example()) if isinstance(leaf, Tensor))]

    @property
    def device(self) -> torch.device:
        return next((t.device for t in self.tensors), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        found = (t.dtype for t in self.tensors if t.is_floating_point() or t.is_complex())
        return next(found, torch.get_default_dtype())


def load(spec: str, *, device: str | None = None, dtype: str | None = None, rows: int = 512) -> Target:
    """Load TARGET and move it.

    ``device`` and ``dtype`` None leave a target as its callable built it; built-ins and models of libraries go to the
    GPU where there is one. ``rows`` is for the built-in MLPs. Raises BadTarget with one line that says what is missing.
    """
    if device == "cuda" and not torch.cuda.is_available():
        built = "has CUDA" if torch.version.cuda else "is a build without CUDA"
        raise BadTarget(f"--device cuda: no CUDA device is available (torch {torch.__version__} {built})")
    if spec in BUILT_IN or spec.partition(":")[0] in libraries.LIBRARIES:
        target = Target(spec, *BUILT_IN[spec].build(rows)) if spec in BUILT_IN else _from_library(spec)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    else:
        target = _from_callable(spec)
    return _moved(target, device, DTYPES[dtype] if dtype else None)


def _from_library(spec: str) -> Target:
    library, _, name = spec.partition(":")
    try:
        return Target(spec, *libraries.LIBRARIES[library](name))
    except FxfuseError:
        raise
    except Exception as error:
        raise BadTarget(f"building {spec} raised {type(error).__name__}: {error}") from error


def _from_callable(spec: str) -> Target:
    where, colon, attribute = spec.rpartition(":")
    if not (where and colon and attribute):
        raise BadTarget(
            f"{spec!r} is neither a built-in target (see fxfuse list) nor package.module:callable nor file.py:callable"
        )
    module = _from_file(where) if where.endswith(".py") else _from_name(where)
    try:
        build = operator.attrgetter(attribute)(module)
    except AttributeError:
        raise BadTarget(f"{where} has no {attribute!r}") from None
    if isinstance(build, nn.Module) or not callable(build):
        raise BadTarget(
            f"{spec} is a {type(build).__name__}; a target is a callable without arguments that returns the model"
        )
    try:
        built = build()
    except Exception as error:
        raise BadTarget(f"calling {spec}() raised {type(error).__name__}: {error}") from error
    return _unpacked(spec, built)


def _from_file(path: str) -> ModuleType:
    file = Path(path)
    if not file.is_file():
        raise BadTarget(f"there is no file {path}")
    # As python FILE would, so that the file can import its neighbours.
    _import_from(str(file.resolve().parent))
    name = f"fxfuse_target_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise BadTarget(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and pickle look their module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadTarget(f"running {path} raised {type(error).__name__}: {error}") from error
    return module


def _from_name(name: str) -> ModuleType:
    # The console script does not have the current directory on its path, python -m has.
    _import_from(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise BadTarget(f"importing {name} raised {type(error).__name__}: {error}") from error


def _import_from(directory: str) -> None:
    if directory not in sys.path:
        sys.path.insert(0, directory)


def _unpacked(spec: str, built: object) -> Target:
    model, *rest = built if isinstance(built, tuple) else (built,)
    if not isinstance(model, nn.Module) or len(rest) > 2:
        got = (
            f"({', '.join(type(part).__name__ for part in built)})"
            if isinstance(built, tuple)
            else type(built).__name__
        )
        raise BadTarget(f"{spec}() returned {got}; it returns an nn.Module, (model, args) or (model, args, kwargs)")
    by = "fxfuse.optimize" if ROOT in vars(model) else "torch.compile" if hasattr(model, "_orig_mod") else ""
    if by:
        raise BadTarget(f"{spec}() returned what {by} made of a model, and eager would be no eager; return the model")
    args = rest[0] if rest else None
    kwargs = rest[1] if len(rest) == 2 else {}
    if isinstance(args, Tensor):
        args = (args,)
    if args is not None and not isinstance(args, tuple | list):
        raise BadTarget(
            f"{spec}() returned args of type {type(args).__name__}; args is a tuple, and keywords come third"
        )
    if not isinstance(kwargs, Mapping):
        raise BadTarget(f"{spec}() returned kwargs of type {type(kwargs).__name__}; kwargs is a dict")
    return Target(spec, model, None if args is None else tuple(args), dict(kwargs))


def _moved(target: Target, device: str | None, dtype: torch.dtype | None) -> Target:
    def move(t: Tensor) -> Tensor:
        return t.to(device=device, dtype=dtype if t.is_floating_point() else None)

    try:
        model = target.model.to(device=device, dtype=dtype)
    except Exception as error:
        raise BadTarget(f"moving {target.name} to {device}, {dtype} raised {type(error).__name__}: {error}") from error
    with contextlib.suppress(NotImplementedError):  # the graph of an exported program has its mode written into it
        model.eval()
    args, kwargs = tree_map_only(Tensor, move, (target.args, target.kwargs))
    return Target(target.name, model, args, kwargs)
