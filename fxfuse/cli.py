"""The ``fxfuse`` command: list, explain, graph, bench, profile, tune, cache.

Exit codes: 0; 1 where fxfuse itself gave no right answer to time; 2 for anything that was asked wrongly or that the
model raised, with one line on stderr; 130 after ^C, with what was finished.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import fxfuse
from fxfuse import api, choose, drawing
from fxfuse.bench import machine_rates, peers, profile_render, render, targets
from fxfuse.bench.libraries import HF
from fxfuse.bench.measure import Result, admissible, measure, measure_shapes
from fxfuse.bench.models import BUILT_IN
from fxfuse.bench.profile import Profile, fallen_back, profile
from fxfuse.bench.progress import Progress
from fxfuse.bench.publish import Outputs, check_place, write
from fxfuse.bench.timer import QUICK, Effort
from fxfuse.errors import FxfuseError
from fxfuse.ops.gpu import driver
from fxfuse.report import MEASURED_HEAD

_TARGET = (
    "a built-in name (fxfuse list), hf:NAME or timm:NAME (random weights, no download), hf:FOLDER (a checkpoint), "
    "package.module:callable or file.py:callable. The callable takes nothing and "
    "returns a model, (model, args) or (model, args, kwargs); the model is put in eval mode."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what was measured is worth more than its µ
    options.stdout = sys.stdout
    # What a target prints must not stand before a document that is to stand alone.
    alone = getattr(options, "json", None) in ("-", True)
    try:
        with redirect_stdout(sys.stderr) if alone else nullcontext():
            return options.command(options)
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing may be written there when the interpreter goes down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as leaving:
        print(f"fxfuse: the target called sys.exit({leaving.code!r})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fxfuse: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        else:
            print(f"fxfuse: {peers.one_line(error, named=not isinstance(error, FxfuseError))}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    names = ", ".join(peers.PEERS)
    parser = argparse.ArgumentParser("fxfuse", description="Find fusions in a PyTorch model, show them, and time them.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    known = commands.add_parser("list", help="the targets that are known by name, one line each")
    known.set_defaults(command=_list)

    explain = commands.add_parser("explain", help="what is fused in a target, what is not, and why; needs no GPU")
    explain.add_argument("target", metavar="TARGET", help=_TARGET)
    explain.add_argument("--json", action="store_true", help="print the report as JSON")
    explain.add_argument("--verbose", action="store_true", help="with the code of each region as rewritten")
    explain.set_defaults(command=_explain)

    graph = commands.add_parser("graph", help="draw the regions of a target before and after; needs no GPU")
    graph.add_argument("target", metavar="TARGET", help=_TARGET)
    graph.add_argument(
        "-o", "--out", metavar="FILE", required=True, help="the ending tells the format: .svg, .html, .dot or .json"
    )
    graph.set_defaults(command=_graph)

    bench = commands.add_parser("bench", help="time a target against eager, torch.compile and oneDNN called by hand")
    bench.add_argument("targets", metavar="TARGET", nargs="+", help=_TARGET)
    bench.add_argument("--json", metavar="FILE", help="write the figures to FILE; - prints JSON and nothing else")
    bench.add_argument("--markdown", metavar="FILE", help="write the tables and what was done to FILE")
    bench.add_argument("--html", metavar="FILE", help="write a report with charts, drawings and what ran to FILE")
    bench.add_argument(
        "--profile", metavar="FILE", help="a JSON of fxfuse profile, for the HTML report to show in place of its own"
    )
    bench.add_argument(
        "--shapes",
        metavar="M,...",
        type=_row_counts,
        help="rows, for models of one tensor: variants are built once for all",
    )
    bench.add_argument(
        "--train", action="store_true", help="forward and backward; fused operators serve inference only"
    )
    bench.add_argument("--quick", action="store_true", help="a few short rounds: shows that it runs, ranks little")
    bench.add_argument(
        "--repeats", metavar="N", type=_positive, help="rounds (default: 30, fewer for a slow model; 7 with --quick)"
    )
    bench.add_argument("--threads", metavar="N", type=_positive, help="CPU threads of torch")
    bench.set_defaults(command=_bench)

    profile = commands.add_parser("profile", help="predict what a call does, trace one, and compare line by line")
    profile.add_argument("target", metavar="TARGET", help=_TARGET)
    defaults = {
        bench: "all that there are for the device",
        profile: "eager and fxfuse, on a GPU compile and liger, too",
    }
    for command, default in defaults.items():
        command.add_argument(
            "--vs", metavar="NAMES", type=_columns, help=f"comma-separated, of {names} (default: {default})"
        )
    profile.add_argument("--json", metavar="FILE", help="write the profile to FILE; - prints JSON and nothing else")
    profile.add_argument(
        "--trace", metavar="FILE", help="write Chrome traces for Perfetto: t.json becomes t-eager.json, t-fxfuse.json"
    )
    profile.add_argument("--verbose", action="store_true", help="with what is predicted of each node")
    profile.set_defaults(command=_profile)

    tune = commands.add_parser("tune", help="measure the implementations of a target's operators, and keep the choices")
    tune.add_argument("target", metavar="TARGET", help=_TARGET)
    tune.add_argument(
        "--rows",
        metavar="M,...",
        type=_row_counts,
        help="rows to measure, for a model of one floating-point tensor (default: those of the target's own example)",
    )
    tune.add_argument("--pack", action="store_true", help="with packed copies of weights among the implementations")
    tune.set_defaults(command=_tune)

    cache = commands.add_parser("cache", help="where measured choices are kept, and how many there are")
    cache.add_argument(
        "--clear", action="store_true", help="forget them all, the measured rates of devices, and compiled kernels"
    )
    cache.set_defaults(command=_cache)

    for command in (explain, graph, bench, profile, tune):
        command.add_argument(
            "--device", choices=("cpu", "cuda"), help="default: where the target is; built-ins: cuda if there is one"
        )
        command.add_argument("--dtype", choices=targets.DTYPES, help="default: as the target is built")
    for command in (explain, graph, bench, profile):
        command.add_argument(
            "--rows", metavar="M", type=_positive, default=512, help="rows of the built-in MLPs' input (default: 512)"
        )
    for command in (known, explain, graph, bench, profile, tune, cache):
        command.add_argument("--traceback", action="store_true", help="show where an error came from")
    return parser


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in peers.PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no column {', '.join(map(repr, unknown))}; there are {', '.join(peers.PEERS)}"
        )
    return names


def _row_counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_positive(count.strip()) for count in text.split(",")))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _list(_options: argparse.Namespace) -> int:
    lines = {name: built_in.line for name, built_in in BUILT_IN.items()}
    lines |= {f"hf:{name}": f"{model.cls} of transformers, random weights" for name, model in HF.items()}
    width = max(map(len, lines))
    for name, line in lines.items():
        print(f"{name:{width}}  {line}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    target, optimized = _optimized(options)
    report = fxfuse.report(optimized)
    print(report.to_json() if options.json else report.explained(), file=options.stdout)
    if options.verbose and not options.json:
        for path, graph_module in fxfuse.graphs(optimized).items():
            print(f"\n{path or target.name}, rewritten:\n{graph_module.code.strip()}")
    return 0


def _optimized(options: argparse.Namespace) -> tuple[targets.Target, Any]:
    target = targets.load(options.target, device=options.device, dtype=options.dtype, rows=options.rows)
    if target.args is not None:
        # optimize() goes on without an example that the model refuses; here that is an error
        peers.build("eager", target)
    return target, fxfuse.optimize(target.model, example_inputs=target.args, example_kwargs=target.kwargs or None)


def _graph(options: argparse.Namespace) -> int:
    drawing.renderer(options.out)
    check_place("--out", options.out)
    with Progress(options.target) as progress:
        progress("building and optimizing")
        optimized = _optimized(options)[1]
        progress("drawing")
        file = fxfuse.draw(optimized, options.out)
    print(file)
    return 0


def _tune(options: argparse.Namespace) -> int:
    target = targets.load(options.target, device=options.device, dtype=options.dtype)
    peers.build("eager", target)  # an example that the model refuses is an error here
    sizes = [target] if options.rows is None else [target.with_rows(rows, "--rows") for rows in options.rows]
    model = fxfuse.optimize(target.model, *target.example(), tune="off", pack=options.pack)
    measured = api.tune_calls(model, [size.example() for size in sizes])
    if measured:
        print(tabulate([m.row() for m in measured], headers=MEASURED_HEAD, disable_numparse=True))
    report = fxfuse.report(model)
    for line in report.notes or ([] if measured else ["no fused operator was called", *fallen_back(report)]):
        print(line)
    return 0


def _cache(options: argparse.Namespace) -> int:
    print(choose.file())
    if options.clear:
        choose.CHOICES.clear()
        machine_rates.clear()
        driver.forget_kernels()
        print("cleared")
        return 0
    ours, others = choose.count()
    print(f"{ours} choices for {choose.versions()}, {choose.device_name('cpu')}")
    print(f"{others} for other devices and versions")
    return 0


def _bench(options: argparse.Namespace) -> int:
    outputs = Outputs(options.json, options.markdown, options.html, options.profile)
    outputs.check()
    effort = QUICK if options.quick else Effort()
    if options.repeats:
        effort = replace(effort, rounds=options.repeats, budget_s=None)
    settings = {
        "columns": options.vs and list(options.vs),
        "rows": options.rows,
        "shapes": options.shapes,
        **asdict(effort),
    }
    results: list[Result] = []
    profiles: list[dict[str, Any]] = []
    options.targets = list(dict.fromkeys(options.targets))
    with _threads(options.threads):
        try:
            for done, spec in enumerate(options.targets, 1):
                for found in _measured(spec, options, effort):
                    if isinstance(found, Result):
                        results.append(found)
                    else:
                        profiles.append(found)
                    outputs.write(results, settings, options.targets[done - 1 :], profiles)
                    if isinstance(found, Result) and options.json != "-":
                        print(render.table(found), end="\n\n", flush=True)
                outputs.write(results, settings, options.targets[done:], profiles)
        finally:  # after an error or ^C too: what was finished is worth keeping
            _print(results, options, settings)
    return 1 if any(result.fxfuse_failed for result in results) else 0


def _measured(spec: str, options: argparse.Namespace, effort: Effort) -> Iterator[Result | dict[str, Any]]:
    """The results of one target, and for the HTML report what runs in it as a ``fxfuse.profile/1``."""
    with Progress(spec) as progress:
        progress("building")
        target = targets.load(spec, device=options.device, dtype=options.dtype, rows=options.rows)
        if options.shapes is None:
            admitted = admissible(target, options.vs, progress)
            found = iter([measure(target, train=options.train, effort=effort, progress=progress, admitted=admitted)])
        else:
            found = measure_shapes(
                target, options.shapes, options.vs, train=options.train, effort=effort, progress=progress
            )
        for result in found:
            progress.clear()
            yield result
        # A profile is of one forward at one size.
        if options.html and not options.profile and options.shapes is None and not options.train:
            yield profile_render.to_show(target, admitted, progress)


def _print(results: Sequence[Result], options: argparse.Namespace, settings: dict[str, Any]) -> None:
    if not results:
        return
    if options.json == "-":
        print(render.as_json(results, settings, unfinished=options.targets[len(results) :]), file=options.stdout)
    else:
        print(render.summary(results), render.LEGEND, sep="\n\n")


def _profile(options: argparse.Namespace) -> int:
    for option, file in (("--json", options.json), ("--trace", options.trace)):
        if file is not None:
            check_place(option, file)
    found: list[Profile] = []

    def keep(so_far: Profile) -> None:
        found[:] = [so_far]
        if options.json not in (None, "-"):
            write(options.json, profile_render.as_json(so_far) + "\n", last=not so_far.unfinished)

    try:
        with Progress(options.target) as progress:
            progress("building")
            target = targets.load(options.target, device=options.device, dtype=options.dtype, rows=options.rows)
            traces = None if options.trace is None else Path(options.trace)
            profile(target, options.vs, traces=traces, progress=progress, after_each=keep)
    finally:  # after an error or ^C too: what was traced is worth keeping
        for one in found:
            as_text = profile_render.table(one, nodes=options.verbose)
            print(profile_render.as_json(one) if options.json == "-" else as_text, file=options.stdout)
    return 0 if any(set_up.name == "fxfuse" for one in found for set_up in one.set_ups) else 1


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
