import copy
import json
from pathlib import Path

import pytest

from fxfuse.bench import schema
from fxfuse.bench.schema import BENCH, PROFILE, BadDocument

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RATIO = {"median": 1.0, "p20": 0.9, "p80": 1.1, "rankable": False}


def variant(name="eager", median=2e-6):
    return {
        "name": name,
        "median_s": median,
        "p20_s": 0.9 * median,
        "p80_s": 1.1 * median,
        "rounds": 7,
        "calls": 3,
        "setup_s": 0.0,
        "speedup_over_eager": dict(RATIO),
        "fxfuse_speedup": None,
        "submit_s": None,
        "kernels": None,
        "end_to_end_s": None,
        "extra_bytes": None,
    }


def result(target="ffn", **changes):
    return {
        "target": target,
        "device": "cpu",
        "dtype": "float32",
        "had_core": 1.0,
        "fused": 1,
        "lowered": 0,
        "kernels_saved": 1,
        "ops": {"eager": 3},
        "variants": [variant(), variant("fxfuse", 1e-6)],
        "weaker_gate": "",
        "left_out": [{"name": "compile", "reason": "no compiler"}],
        "report": None,
        **changes,
    }


def bench(*results):
    return {
        "schema": BENCH,
        "machine": {"cpu": "a CPU", "threads": 2, "gpu": None},
        "versions": {"torch": "2.13"},
        "settings": {"rows": 512},
        "results": list(results),
        "unfinished": [],
    }


def profile():
    kernel = {"name": "nvjet", "kind": "gemm", "start_us": 0, "us": 2.5}
    region = {"region": "", "flops": 10, "bytes": 5, "floor_us": 1.0, "observed_us": None}
    return {
        "schema": PROFILE,
        "setups": [{"name": "eager", "kernels": [kernel], "regions": [region], "lines": [{"what": "kernels"}]}],
    }


def at(document, path):
    """The container and the key of ``path``, as in ("results", 0, "target")."""
    for key in path[:-1]:
        document = document[key]
    return document, path[-1]


FIRST = ("results", 0)
WRONG = [
    (("schema",), 1, "its schema is 1, not 'fxfuse.bench/1'"),
    (("schema",), "fxfuse.bench/2", "its schema is 'fxfuse.bench/2', not 'fxfuse.bench/1'"),
    (("results",), {}, "results is {}, not a list"),
    (("results", 0), 3, "results[0] is 3, not an object"),
    (("machine", "gpu"), 7, "machine.gpu is 7, not a text"),
    (("machine", "threads"), 0, "machine.threads is 0, not at least 1"),
    (("unfinished",), [None], "unfinished[0] is null, not a text"),
    ((*FIRST, "target"), 1.5, "results[0].target is 1.5, not a text"),
    ((*FIRST, "ops"), {"eager": "three"}, 'results[0].ops.eager is "three", not a number'),
    ((*FIRST, "extra"), 1, "results[0] has extra, which the schema does not know"),
    ((*FIRST, "variants", 1, "median_s"), 0, "results[0].variants[1].median_s is 0, not above 0"),
    ((*FIRST, "variants", 1, "median_s"), True, "results[0].variants[1].median_s is true, not a number"),
    ((*FIRST, "variants", 1, "median_s"), float("nan"), "results[0].variants[1].median_s is NaN, not a number"),
    ((*FIRST, "variants", 0, "p20_s"), 3e-6, "results[0].variants[0].median_s is not between p20_s and p80_s"),
    (
        (*FIRST, "variants", 0, "speedup_over_eager", "rankable"),
        "no",
        'results[0].variants[0].speedup_over_eager.rankable is "no", not true or false',
    ),
    (
        (*FIRST, "variants", 0, "name"),
        "onednn",
        "results[0].variants has no eager, which all others are compared with",
    ),
    ((*FIRST, "report"), {}, "results[0].report has no model"),
    ((*FIRST, "held_bytes"), -1, "results[0].held_bytes is -1, not at least 0"),
    ((*FIRST, "variants", 0, "first_call_s"), None, "results[0].variants[0].first_call_s is null, not a number"),
]


@pytest.mark.parametrize(("path", "value", "says"), WRONG, ids=[says for *_, says in WRONG])
def test_one_sentence_says_what_is_wrong(path, value, says):
    document = bench(result())
    container, key = at(document, path)
    container[key] = value
    with pytest.raises(BadDocument) as refused:
        schema.check(document, BENCH)
    assert str(refused.value) == says


def paths(value, path=()):
    """Every key of every object in a document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from paths(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from paths(inner, (*path, i))


def test_what_came_later_may_stand_in_a_file():
    document = bench(result(held_bytes=10))
    document["results"][0]["variants"][0]["first_call_s"] = 0.5
    schema.check(document, BENCH)


OPEN = [("settings", "rows"), ("versions", "torch"), (*FIRST, "ops", "eager")]


@pytest.mark.parametrize("path", [path for path in paths(bench(result())) if path not in OPEN], ids=str)
def test_nothing_may_be_missing(path):
    document = bench(result())
    container, key = at(document, path)
    del container[key]
    with pytest.raises(BadDocument, match=f"has no {key}$|its schema is None"):
        schema.check(document, BENCH)


def test_the_same_row_twice():
    schema.check(bench(result(), result(dtype="bfloat16"), result("other")), BENCH)
    with pytest.raises(BadDocument, match=r"results\[1\] is ffn, cpu, float32 again"):
        schema.check(bench(result(), result()), BENCH)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("schema",), BENCH, "its schema is 'fxfuse.bench/1', not 'fxfuse.profile/1'"),
        (("setups", 0, "kernels", 0, "us"), -1, "setups[0].kernels[0].us is -1, not at least 0"),
        (("setups", 0, "regions", 0, "flops"), "many", 'setups[0].regions[0].flops is "many", not a number'),
    ],
)
def test_a_profile(path, value, says):
    document = profile()
    schema.check({**document, "more": "is allowed"}, PROFILE)
    broken = copy.deepcopy(document)
    container, key = at(broken, path)
    container[key] = value
    with pytest.raises(BadDocument) as refused:
        schema.check(broken, PROFILE)
    assert str(refused.value) == says


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is no JSON: "), ("[1]", ": its schema is None"), ('{"schema": "x"}', ": its schema is 'x'")],
)
def test_a_file_is_named(text, says, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(BadDocument) as refused:
        schema.read(file, BENCH)
    assert str(refused.value).startswith(f"{file}{says}" if says[0] == ":" else f"{file} {says}")


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_results_of_the_repository_are_of_the_schema(file):
    name = json.loads(file.read_text())["schema"]
    assert name.startswith("fxfuse.")
    if name in (BENCH, PROFILE):
        schema.read(file, name)
