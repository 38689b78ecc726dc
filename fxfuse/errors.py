"""The one catalogue of what can go wrong. Each error says what was wrong, where, and what to do."""

from __future__ import annotations

import warnings


class FxfuseError(Exception):
    """Base of every error that fxfuse raises by itself."""


class NotOptimizable(FxfuseError, TypeError):
    """The object given is nothing that can be optimized."""


class UnsupportedModel(FxfuseError, ValueError):
    """The model is a module, but one that fxfuse must leave alone: a scripted one."""


class ExampleWarning(UserWarning):
    """The model's own forward refused the example inputs, so nothing was learned from them."""


class KernelWarning(UserWarning):
    """A GPU kernel could not be built, and eager's run in its place."""


class ChoicesWarning(UserWarning):
    """The table of measured choices could not be read or kept; everything works without it."""


class NothingFused(FxfuseError, RuntimeError):
    """``strict={"fuse"}`` was asked for and no candidate was fused."""


class NotOptimized(FxfuseError, ValueError):
    """report, graphs and restore take what optimize returned."""


class FellBack(FxfuseError, RuntimeError):
    """``strict={"run"}`` was asked for and a call broke an assumption of its region."""


class RestoreRefused(FxfuseError, RuntimeError):
    """A region's forward was replaced by somebody else since, so putting the old one back would drop theirs."""


class MissingPackage(FxfuseError, ImportError):
    """A package that is needed for this alone is not installed."""


class UnknownFormat(FxfuseError, ValueError):
    """The ending of a file's name is none that can be written."""


class RewriteFailed(FxfuseError, RuntimeError):
    """A pass left an invalid graph. This is a fault of the pass; the message names it."""


def not_optimizable(model: object) -> NotOptimizable:
    what = f"{type(model).__module__}.{type(model).__qualname__}".removeprefix("builtins.")
    return NotOptimizable(
        f"optimize() takes an nn.Module, a torch.fx.GraphModule or a Python function, not {what}. "
        "Pass the model itself, not its class, its state or a list of modules."
    )


def example_failed(model: object, error: BaseException) -> str:
    name = getattr(model, "__name__", type(model).__name__)
    return (
        f"The example inputs were not used: {name} raised {type(error).__name__} on them ({_short(error)}). "
        "Without an example less is captured, and nothing is checked. "
        "Pass what the forward takes, as example_inputs=(...) and example_kwargs={...}."
    )


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:200] + "..."


def nothing_fused(report: object) -> NothingFused:
    return NothingFused("strict={'fuse'} was asked for, and nothing was fused. The report says why:\n" + str(report))


def fell_back(path: str, why: str) -> FellBack:
    return FellBack(
        f"strict={{'run'}} was asked for, and a call of region {path or '.'!r} broke an assumption: {why}. "
        "Undo that, call fxfuse.optimize() again as things are now (with example_inputs of this kind), or leave "
        "'run' out of strict: the model's own forward then runs."
    )


def restore_refused(path: str) -> RestoreRefused:
    return RestoreRefused(
        f"the forward of {path or 'the model'!r} was replaced after fxfuse.optimize(), and may call the fused one. "
        "Undo that replacement first, then call fxfuse.restore() again."
    )


def rewrite_failed(rule: str, error: BaseException) -> RewriteFailed:
    return RewriteFailed(f"pass {rule} left an invalid graph: {error}. Leave it out with Options(exclude=({rule!r},)).")


def missing_package(what: str, package: str, install: str) -> MissingPackage:
    return MissingPackage(f"{what} needs {package}, which is not installed: pip install {install}")


def unknown_format(name: str, endings: list[str]) -> UnknownFormat:
    known = ", ".join(f".{ending}" for ending in endings)
    return UnknownFormat(f"{name}: the ending tells what is written, and it is none of {known}")


def not_optimized(model: object) -> FxfuseError:
    return NotOptimized(f"this {type(model).__name__} did not come from fxfuse.optimize()")


def refuse_unsupported(model: object) -> None:
    """Raise UnsupportedModel where there is no forward in Python, or no weights to compute with."""
    import torch

    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModel(
            f"{name} is scripted: its forward is no Python code. Optimize the module before scripting it."
        )


def warn_of_kernel(name: str, error: BaseException) -> None:
    """Python shows the same text once."""
    text = (
        f"the GPU kernel {name!r} could not be built, and eager's run in its place: {_short(error)}. "
        "CUDA builds of torch bring the compiler that it takes; `fxfuse cache --clear` drops those that are kept."
    )
    warnings.warn(text, KernelWarning, stacklevel=2)
