"""The drawings and the report in a real browser, where one is installed: nothing is cut off on a desktop or a phone."""

import html
import json
import re
import shutil
import subprocess

import pytest

import fxfuse
from fxfuse.bench import html as report
from fxfuse.bench import targets
from fxfuse.bench.measure import measure
from fxfuse.bench.timer import Effort

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")

FRAME = """<!DOCTYPE html>
<iframe style="width:{width}px; height:800px; border:0" srcdoc="{page}"></iframe><pre></pre>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const page = frame.contentDocument, found = [];
  page.querySelectorAll("details").forEach(d => d.open = true);
  const inside = (a, b) =>
    a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
  page.querySelectorAll(".node").forEach(node => {{
    const box = node.querySelector("rect").getBoundingClientRect();
    node.querySelectorAll(":scope > text").forEach(text => {{
      if (!inside(text.getBoundingClientRect(), box)) found.push("out of its box: " + text.textContent);
    }});
  }});
  page.querySelectorAll("svg text, svg rect, svg path").forEach(part => {{
    const whole = part.closest("svg").getBoundingClientRect();
    if (!inside(part.getBoundingClientRect(), whole)) found.push("out of its drawing: " + part.outerHTML);
  }});
  page.querySelectorAll("svg .sub").forEach(a => page.querySelectorAll("svg .node rect").forEach(b => {{
    const s = a.getBoundingClientRect(), t = b.getBoundingClientRect();
    const apart = s.left >= t.right || t.left >= s.right || s.top >= t.bottom || t.top >= s.bottom;
    if (!apart) found.push("on a box: " + a.textContent);
  }}));
  const low = s => Math.max(0, ...[...page.querySelectorAll(s)].slice(0, 1).map(e => e.getBoundingClientRect().bottom));
  const answers = {{did: low("ul.plain"), brought: low(".bar.ours")}};
  const fetched = frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name);
  const reaches = e => {{ e.focus(); return page.activeElement === e; }};
  const reached = [...page.querySelectorAll("a, summary, [tabindex]")].filter(reaches);
  const scrolls = [...page.querySelectorAll("*")].filter(e => e.scrollWidth > e.clientWidth + 1
    && ["auto", "scroll"].includes(frame.contentWindow.getComputedStyle(e).overflowX));
  const keys = {{scrolling: scrolls.length, unreached: scrolls.filter(e => !reached.includes(e)).length}};
  const background = frame.contentWindow.getComputedStyle(page.body).backgroundColor;
  const wide = page.documentElement.scrollWidth;
  document.querySelector("pre").textContent = JSON.stringify({{found, background, wide, answers, fetched, keys}});
}};
</script>"""


def looked_at(page, folder, width, *flags):
    """What the browser says of ``page``: parts that are cut off, its background, and how wide it came out."""
    file = folder / "frame.html"
    file.write_text(FRAME.format(width=width, page=html.escape(page)))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", *flags]
    command += [f"--user-data-dir={folder / 'browser'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)[1]))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    brief = Effort(rounds=2, warmup_s=0.0, block_s=0.0)
    loaded = [targets.load(name, device="cpu", rows=2) for name in ("gpt2-like", "llama-like", "packed-glu")]
    results = [measure(target, [], effort=brief) for target in loaded]
    model = fxfuse.optimize(loaded[1].model, *loaded[1].example())
    kernels = [{"name": f"k{i}", "kind": "gemm", "start_us": 10.0 * i, "us": 9.0} for i in range(5)]
    region = {"region": "", "flops": 4e9, "bytes": 8e7, "floor_us": 20.0, "observed_us": 100.0}
    setups = [{"name": name, "kernels": kernels, "regions": [region], "lines": []} for name in ("eager", "fxfuse")]
    rates = {"bandwidth": 4e12, "flops": {"bfloat16": 8e14}}
    return {
        "graph": fxfuse.draw(model, folder / "a.html").read_text(),
        "one": report.report(results[:1]),
        "report": report.report(results, profiles=[{"target": "", "setups": setups, "rates": rates}]),
    }


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["graph", "report"])
def test_nothing_is_cut_off(name, width, pages, tmp_path):
    seen = looked_at(pages[name], tmp_path, width)
    assert seen["found"] == []
    assert seen["wide"] <= width


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_the_first_screen_says_what_was_done_and_what_it_brought(width, height, pages, tmp_path):
    seen = looked_at(pages["one"], tmp_path, width)
    assert 0 < seen["answers"]["did"] < height
    assert 0 < seen["answers"]["brought"] < height


@pytest.mark.parametrize("name", ["graph", "report"])
def test_keys_reach_all_that_scrolls_and_nothing_is_fetched(name, pages, tmp_path):
    seen = looked_at(pages[name], tmp_path, 390)
    assert seen["keys"]["scrolling"] > 0
    assert seen["keys"]["unreached"] == 0
    assert seen["fetched"] == []


def test_dark_follows_the_reader(pages, tmp_path):
    light, dark = (
        looked_at(pages["report"], tmp_path, 1280, f"--blink-settings=preferredColorScheme={scheme}")["background"]
        for scheme in (1, 0)
    )
    light, dark = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in (light, dark))
    assert light > 600 > 200 > dark
