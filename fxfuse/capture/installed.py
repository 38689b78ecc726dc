"""What an optimized model carries at its root, and what becomes of regions whose assumptions keep failing."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx

from fxfuse import errors
from fxfuse.capture import by_value
from fxfuse.capture import region as regions
from fxfuse.capture.arguments import Recorded
from fxfuse.capture.region import Region
from fxfuse.capture.rewritten import build_regions
from fxfuse.capture.tracer import LOCK
from fxfuse.capture.walk import Walk, join
from fxfuse.ops.prepack import Store
from fxfuse.options import Options
from fxfuse.report import Report

PATIENCE = 3
"""A region whose assumptions failed this often is traced again, smaller: this many calls running where a module inside
it was changed, as a hook comes and goes; in all where other kinds of calls take turns with those that it serves."""
MOST_TRACES = 8
"""A region is traced again this often at most."""
GIVE_UP = 64
"""A region whose assumptions failed this many calls running is taken out: it only costs time."""


class Installed:
    """What an optimized model (or function) carries at its root."""

    def __init__(
        self,
        report: Report,
        regions: list[Region],
        graph: fx.Graph | None = None,
        options: Options | None = None,
        recorded: Mapping[str, Recorded] | None = None,
    ):
        self.report, self.regions, self.options = report, regions, options or Options()
        report.options = self.options.explained()
        self.graph = graph
        """Of a GraphModule, which has no regions: the graph that it had before."""
        self.recorded = recorded
        """Module path -> its call in the example run."""
        self.leaves: set[str] = set()
        """Paths of modules that were traced through once, and are only called since."""
        self.traces: Counter[str] = Counter()
        """Region path -> how often it was traced again."""

    def add(self, region: Region) -> None:
        """Install a region; it goes on counting where an earlier one of its path has stopped."""
        region.calls = self.report.calls.setdefault(region.path, region.calls)
        region.fell_back = self.fell_back
        store = self.report.packed
        region.pack_into(store if isinstance(store, Store) else None)
        self._capture_calls(region)
        if region.on_module:
            regions.install(region)
        self.regions = [*(r for r in self.regions if r.path != region.path), region]

    def _capture_calls(self, region: Region) -> None:
        if not self.options.cuda_graphs:
            return

        def not_captured(why: str) -> None:
            note = f"region {region.path or '.'}: calls without a CUDA graph: {why}"
            if note not in self.report.notes:
                self.report.notes.append(note)

        region.capture_calls(not_captured)

    def fell_back(self, region: Region, why: str, at: str | None) -> None:
        """A call of ``region`` broke an assumption. ``at``: path of the inlined module that it is about."""
        if "run" in self.options.strict:
            raise errors.fell_back(region.path, why)
        if not region.on_module:
            return
        running = region.running_fallbacks
        failures = region.fallbacks if at is None else running
        again = failures >= PATIENCE and region.may_be_traced_again
        # Other threads meanwhile, and whoever calls while something is traced, run the original forward.
        if (running >= GIVE_UP or again) and LOCK.acquire(blocking=False):
            try:
                if regions.is_installed(region):
                    self._take_out(region, why) if running >= GIVE_UP else self._trace_again(region, why, at)
            finally:
                LOCK.release()

    def _take_out(self, region: Region, why: str) -> None:
        regions.uninstall(region.owner)
        self.regions = [r for r in self.regions if r is not region]
        for info in self.report.regions:
            if info.path == region.path:
                info.installed, info.note = False, f"taken out: {why}"
        self.report.notes.append(
            f"region {region.path or '.'} was taken out: {GIVE_UP} calls running broke an assumption ({why})"
        )

    def _trace_again(self, region: Region, why: str, at: str | None) -> None:
        """Trace around the module that changed, where it is one; else what lies inside the region, which stays."""
        region.may_be_traced_again = False
        self.traces[region.path] += 1
        if self.traces[region.path] > MOST_TRACES:
            return
        gone = [r for r in self.regions if _within(r.path, region.path) and regions.is_installed(r)]
        for old in gone:
            regions.uninstall(old.owner)
        if why.startswith(by_value.DECIDED) and self._add_without_values(region):
            for old in gone:
                regions.install(old)
            return
        if at is not None:
            self.leaves.add(join(region.path, at))
        wrong = {} if at is not None else {region.path: f"its region falls back: {why}"}
        found = Report(self.report.model)
        try:
            walk = Walk(region.path, region.owner, self.options, self.recorded, wrong, self.leaves)
            new = build_regions(walk.traces, self.options, found)
        except Exception as error:  # the call that is under way has an answer without
            for old in gone:
                regions.install(old)
            name = f"{type(error).__name__}: {error}"
            self.report.notes.append(f"region {region.path or '.'} could not be traced again ({name})")
            return
        if at is None:
            regions.install(region)
        self.regions = [r for r in self.regions if r not in gone or (r is region and at is None)]
        for r in new:
            self.add(r)
        self._report(region, found, walk, at is None)
        names = ", ".join(r.path or "." for r in new) or "none"
        self.report.notes.append(
            f"region {region.path or '.'} fell back {PATIENCE} times ({why}); traced again"
            + (f" with {at} as a call" if at is not None else " inside")
            + f", regions now: {names}"
        )

    def _add_without_values(self, region: Region) -> bool:
        """Trace the module once more for other values, if there is a graph that decides nothing by them."""
        try:
            walk = Walk(region.path, region.owner, self.options, self.recorded, leaves=self.leaves, by_value=False)
            found = build_regions(walk.traces, self.options, Report(self.report.model))
        except Exception:  # the call that is under way has an answer without
            return False
        new = next((r for r in found if r.path == region.path), None)
        if new is None:
            return False

        def fell_back(_: Region, why: str, at: str | None) -> None:
            self.fell_back(new, why, at)
            if new.fallbacks >= PATIENCE:  # something else is not as it was: the first region is to say what
                region.without_values, region.may_be_traced_again = None, True

        new.previous, new.calls, new.fell_back = region.previous, region.calls, fell_back
        new.pack_into(region.store)
        region.without_values = new
        self.report.notes.append(
            f"region {region.path or '.'}: a second graph serves calls whose values decide otherwise than the example's"
        )
        return True

    def _report(self, region: Region, found: Report, walk: Walk, stays: bool) -> None:
        """Events are counted once: those of a region that stays cover all that lies inside it."""
        report = self.report
        kept = [e for e in report.events if not _within(e.region, region.path) or (stays and e.region == region.path)]
        known = {(e.kind, e.rule, e.source) for e in kept if stays and e.region == region.path}
        report.events = kept + [e for e in found.events if (e.kind, e.rule, e.source) not in known]
        paths = {info.path for info in found.regions}
        stale = [r for r in report.regions if r.path in paths or (_within(r.path, region.path) and not stays)]
        report.regions = [r for r in report.regions if r not in stale] + found.regions
        report.linears |= {} if stays else found.linears
        listed = {u.path for u in report.uncaptured}
        report.uncaptured += [u for u in walk.uncaptured if u.path not in listed and u.path != region.path]

    def __deepcopy__(self, memo: dict[int, Any]) -> Installed:
        new = Installed(copy.deepcopy(self.report, memo), copy.deepcopy(self.regions, memo), options=self.options)
        new.graph, new.recorded = copy.deepcopy(self.graph, memo), self.recorded
        new.leaves, new.traces = set(self.leaves), Counter(self.traces)
        for region in new.regions:
            region.fell_back = new.fell_back
            new._capture_calls(region)
        return new


def _within(path: str, base: str) -> bool:
    return not base or path == base or path.startswith(base + ".")
