import os

import pytest
import torch

from fxfuse.bench import onednn_verbose
from fxfuse.bench.onednn_verbose import Primitive, parse
from fxfuse.ops import onednn

LINE = (
    "onednn_verbose,v1,primitive,exec,cpu,inner_product,brg_matmul:avx512_core,forward_inference,"
    "src:f32::blocked:ab::f0 wei:f32::blocked:ab::f0 bia:f32::blocked:a::f0 dst:f32::blocked:ab::f0,"
    "attr-scratchpad:user attr-post-ops:eltwise_gelu_tanh,,mb64ic1024oc1024,1.51807"
)


def test_a_line_of_an_execution():
    found = parse(LINE)
    assert found == Primitive(
        primitive="inner_product",
        implementation="brg_matmul:avx512_core",
        memory="src:f32::blocked:ab::f0 wei:f32::blocked:ab::f0 bia:f32::blocked:a::f0 dst:f32::blocked:ab::f0",
        post_ops="eltwise_gelu_tanh",
        problem="mb64ic1024oc1024",
        us=pytest.approx(1518.07),
    )


@pytest.mark.parametrize(
    "line",
    [
        "",
        "onednn_verbose,v1,info,cpu,isa:Intel AVX-512",
        LINE.replace(",exec,", ",create:cache_miss,"),
        LINE.replace("onednn_verbose", "dnnl_verbose"),
        "a line of the program's own",
    ],
)
def test_lines_that_tell_of_something_else(line):
    assert parse(line) is None


@pytest.mark.skipif(not onednn.AVAILABLE, reason="needs oneDNN")
def test_what_a_call_runs_is_caught_and_nothing_of_it_is_printed(capfd):
    x, weight = torch.randn(64, 256), torch.randn(128, 256)
    print("before")
    with torch.inference_mode():
        found = onednn_verbose.primitives(lambda: onednn.pointwise(x, weight, None, "gelu", (), "tanh"))
    os.write(1, b"after\n")
    (one,) = found
    assert one.primitive in onednn_verbose.PRODUCTS
    assert one.post_ops == "eltwise_gelu_tanh"
    assert capfd.readouterr().out == "before\nafter\n"


def test_output_comes_back_after_an_error(capfd):
    def raises():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        onednn_verbose.primitives(raises)
    os.write(1, b"still here\n")
    assert capfd.readouterr().out == "still here\n"
