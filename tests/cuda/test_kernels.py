"""The kernels give eager's answer by the rule of DESIGN 4, whatever the sizes, and write every element of it."""

import math
import re
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxfuse import ops
from fxfuse.ops.activations import ACTIVATIONS
from fxfuse.ops.gpu import decode, hopper, portable, stream
from fxfuse.ops.gpu.product import Product, implementations

ACTS = ["", *ACTIVATIONS]
SIZES = {
    "decode": [(1, 264, 520), (7, 40, 13), (8, 1024, 512), (15, 4096, 264)],
    # One row and many, tiles that are split and not, more than one warpgroup.
    "stream": [
        (1, 264, 520),
        (16, 40, 13),
        (33, 1024, 512),
        (64, 4096, 264),
        (100, 328, 1000),
        (20, 72, 13000),
        (127, 72, 13000),
    ],
    "hopper192": [(300, 264, 520), (1000, 1032, 200), (513, 256, 8), (256, 768, 384)],
    "triton128": [(257, 264, 520), (1000, 77, 13)],
    "triton64": [(33, 40, 200), (300, 1000, 1001)],
    "hopper128": [(257, 328, 1000), (129, 256, 64)],
}


@pytest.fixture(params=SIZES)
def kernel(request: pytest.FixtureRequest) -> str:
    served = {"decode": decode.serves, "stream": stream.serves, **dict.fromkeys(portable.TILES, portable.serves)}
    serves = served.get(request.param, hopper.serves)
    if not serves(0):
        pytest.skip(f"{request.param} does not run on this GPU")
    return request.param


def apply(act: str, h: Tensor) -> Tensor:
    return ACTIVATIONS[act].function(h) if act else h


def arguments(act: str) -> tuple[float, ...]:
    return ACTIVATIONS[act].defaults if act else ()


def operands(rows: int, k: int, n: int, dtype: torch.dtype, *, gated: bool, bias: bool) -> list[Tensor | None]:
    x, w0, w1 = torch.randn(rows, k), 2 * torch.randn(n, k) / k**0.5, torch.randn(n, k) / k**0.5
    b0, b1 = (torch.randn(n), torch.randn(n)) if bias else (None, None)
    return [None if t is None else t.cuda().to(dtype) for t in (x, w0, w1 if gated else w0, b0, b1 if gated else None)]


def eager(act: str, gated: bool, x: Tensor, w0: Tensor, w1: Tensor, b0: Tensor | None, b1: Tensor | None) -> Tensor:
    y = apply(act, F.linear(x, w0, b0))
    return y * F.linear(x, w1, b1) if gated else y


def assert_right(y: Tensor, act: str, gated: bool, tensors: list[Tensor | None]) -> None:
    """DESIGN 4's rule. The magnitude of a product of two is that of each times the other."""
    exact = [None if t is None else t.double() for t in tensors]
    r, e = eager(act, gated, *exact), eager(act, gated, *tensors).double()
    x, w0, w1, b0, b1 = (None if t is None else t.abs() for t in exact)
    magnitude = F.linear(x, w0, b0)
    if gated:
        magnitude = magnitude * F.linear(x, w1, b1)
    epsilon = torch.finfo(y.dtype).eps
    assert (y.double() - r).norm() <= 2 * (e - r).norm() + 4 * epsilon * magnitude.norm()
    assert ((y.double() - r).abs() <= 2 * (e - r).abs() + 8 * epsilon * magnitude).all()


@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize(
    ("act", "bias", "dtype"),
    [
        *((act, True, torch.bfloat16) for act in ACTS),
        *(
            (act, bias, dtype)
            for act in ("", "gelu")
            for bias, dtype in ((False, torch.bfloat16), (True, torch.float16))
        ),
    ],
)
def test_every_activation(kernel, act, gated, bias, dtype, poisoned):
    for rows, k, n in SIZES[kernel]:
        tensors = operands(rows, k, n, dtype, gated=gated, bias=bias)
        y = Product(act, arguments(act), gated=gated, only=kernel).run(*tensors)
        assert y is not None
        assert_right(y, act, gated, tensors)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that kernels are to write holds NaN before."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))


SPECIAL = [math.nan, math.inf, -math.inf, 3e38, -3e38, 1e30, -1e30, 1e13, -1e13, 0.0, -0.0, 1.0, -1.0, 6e4, -6e4, 0.0]


@pytest.mark.parametrize("act", ACTS)
def test_nan_and_inf_stand_where_eager_has_them(kernel, act):
    dtype, rows = torch.bfloat16, 3 if kernel in ("decode", "stream") else 300
    bias = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).cuda()
    x, weight = torch.zeros(rows, 256, dtype=dtype).cuda(), torch.zeros(len(SPECIAL), 256, dtype=dtype).cuda()
    y = Product(act, arguments(act), gated=False, only=kernel).run(x, weight, weight, bias, None)
    e = eager(act, False, x, weight, weight, bias, None)
    assert y is not None
    for where in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(where(y), where(e)), (where.__name__, bias[(where(y) != where(e)).any(0)])


def test_inf_in_x_stays_in_its_row(kernel, dtype):
    rows, k, n = SIZES[kernel][0]
    tensors = operands(rows, k, n, dtype, gated=True, bias=True)
    tensors[0][-1, 3] = math.inf
    y, e = Product("silu", (), gated=True, only=kernel).run(*tensors), eager("silu", True, *tensors)
    assert torch.equal(y.isfinite(), e.isfinite())


def test_the_same_bits_each_time(kernel, dtype):
    rows, k, n = SIZES[kernel][1]
    tensors = operands(rows, k, n, dtype, gated=True, bias=True)
    product = Product("gelu", (), gated=True, only=kernel)
    first = product.run(*tensors)
    assert all(torch.equal(product.run(*tensors), first) for _ in range(10))


def test_weights_that_moved_and_other_rows(kernel, dtype):
    """What is kept of one call is not taken for another's."""
    product = Product("gelu", (), gated=True, only=kernel)
    for rows, k, n in (*SIZES[kernel], *SIZES[kernel]):
        tensors = operands(rows, k, n, dtype, gated=True, bias=True)
        assert_right(product.run(*tensors), "gelu", True, tensors)


LAYOUTS = {
    "transposed": lambda n, k, **of: torch.empty(2, k, n, **of).transpose(1, 2),
    "columns of one": lambda n, k, **of: torch.empty(k, 2 * n, **of).t().unflatten(0, (2, n)),
    "even and odd rows": lambda n, k, **of: torch.empty(n, 2, k, **of).transpose(0, 1),
    "wider rows": lambda n, k, **of: torch.empty(2, n, k + 8, **of)[..., :k],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
def test_weights_are_read_where_they_lie(kernel, layout, gated, dtype, poisoned):
    for rows, k, n in SIZES[kernel]:
        n += -n % 8
        tensors = operands(rows, k, n, dtype, gated=gated, bias=True)
        weights = LAYOUTS[layout](n, k, device="cuda", dtype=dtype)
        tensors[1:3] = weights[0].copy_(tensors[1]), weights[1 if gated else 0].copy_(tensors[2])
        y = Product("gelu", (), gated=gated, only=kernel).run(*tensors)
        dense_only = kernel == "decode"
        wide_only = kernel == "hopper192" and layout in ("transposed", "columns of one")
        unaligned = any(t is not None and t.data_ptr() % 16 for t in tensors)
        if dense_only or wide_only or unaligned:
            assert y is None
        else:
            assert y is not None
            assert_right(y, "gelu", gated, tensors)


def test_leading_dimensions(kernel, dtype):
    rows, k, n = SIZES[kernel][0]
    x, w, _, b, _ = operands(rows, k, n, dtype, gated=False, bias=True)
    product = Product("relu", (), gated=False, only=kernel)
    assert product.run(x.view(rows, 1, k), w, w, b, None).shape == (rows, 1, n)
    assert torch.equal(product.run(x.view(1, rows, k), w, w, b, None)[0], product.run(x, w, w, b, None))


def test_several_streams_and_threads(kernel, dtype):
    rows, k, n = SIZES[kernel][0]
    product = Product("silu", (), gated=True, only=kernel)
    wrong: list[str] = []

    def serve(which: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            tensors = operands(rows, k, n, dtype, gated=True, bias=True)
            expected = product.run(*tensors).clone()
            for _ in range(50):
                if not torch.equal(product.run(*tensors), expected):
                    wrong.append(f"thread {which}")

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one(kernel, dtype):
    rows, k, n = SIZES[kernel][0]
    product = Product("silu", (), gated=True, only=kernel)
    for device in (1, 0, 1):
        tensors = [t.to(f"cuda:{device}") for t in operands(rows, k, n, dtype, gated=True, bias=True)]
        assert_right(product.run(*tensors), "silu", True, tensors)
    assert torch.cuda.current_device() == 0


REFUSED = {
    "float32": lambda t: [None if x is None else x.float() for x in t],
    "another dtype of the weights": lambda t: [t[0], *(x.float() for x in t[1:])],
    "a transposed weight": lambda t: [t[0], t[1].t().contiguous().t(), *t[2:]],
    "strided rows": lambda t: [torch.cat([t[0], t[0]], 1)[:, ::2], *t[1:]],
    "no rows": lambda t: [t[0][:0], *t[1:]],
    "an unaligned x": lambda t: [torch.cat([t[0].flatten(), t[0][0]])[1 : t[0].numel() + 1].view(t[0].shape), *t[1:]],
    "other columns": lambda t: [t[0][:, :-8].contiguous(), *t[1:]],
    "a strided bias": lambda t: [*t[:3], torch.cat([t[3], t[3]])[::2], t[4]],
    "one bias of two": lambda t: [*t[:4], None],
    "the other bias of two": lambda t: [*t[:3], None, t[4]],
    "a weight on the CPU": lambda t: [t[0], t[1].cpu(), *t[2:]],
    "a bias on the CPU": lambda t: [*t[:3], t[3].cpu(), t[4]],
}
BY_REGIONS = {
    "a bias of one": lambda t: [*t[:3], t[3][:1], t[4]],
    "a short bias": lambda t: [*t[:3], t[3][:-1], t[4]],
    "a weight of one row": lambda t: [*t[:2], t[2][:1], *t[3:]],
    "a weight of another dtype": lambda t: [*t[:2], t[2].float(), *t[3:]],
}


@pytest.mark.parametrize("change", REFUSED)
def test_left_to_eager(kernel, change, dtype):
    rows, k, n = SIZES[kernel][0]
    tensors = operands(rows, k, n, dtype, gated=True, bias=True)
    product = Product("silu", (), gated=True, only=kernel)
    product.run(*tensors)
    assert product.run(*REFUSED[change](tensors)) is None
    assert_right(product.run(*tensors), "silu", True, tensors)


@pytest.mark.parametrize("change", [*REFUSED, *BY_REGIONS])
def test_functions_answer_as_eager_whatever_they_are_given(change, dtype):
    """Also after a good call of the same shapes, and with eager's errors."""
    tensors = operands(4, 264, 520, dtype, gated=True, bias=True)
    with torch.inference_mode():
        x, w0, w1, b0, b1 = tensors
        assert_right(ops.gated_linear(x, w0, b0, w1, b1, "silu"), "silu", True, tensors)
        x, w0, w1, b0, b1 = (REFUSED | BY_REGIONS)[change](tensors)
        try:
            e = eager("silu", True, x, w0, w1, b0, b1)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
                ops.gated_linear(x, w0, b0, w1, b1, "silu")
        else:
            assert torch.equal(ops.gated_linear(x, w0, b0, w1, b1, "silu"), e)


def test_nothing_is_compiled_while_a_stream_is_captured(dtype):
    tensors = operands(4, 256, 96, dtype, gated=True, bias=True)
    product = Product("silu", (), gated=True, only="decode")
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert product.run(*tensors) is None
    assert product.run(*tensors) is not None


def test_a_captured_launch_reads_new_values(kernel, dtype):
    rows, k, n = SIZES[kernel][0]
    tensors = operands(rows, k, n, dtype, gated=True, bias=True)
    product = Product("silu", (), gated=True, only=kernel)
    product.run(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product.run(*tensors)
    for tensor in tensors:
        tensor.mul_(0.5)
    graph.replay()
    assert_right(y, "silu", True, tensors)


def test_more_than_2_31_elements():
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB")
    rows, k, n = (1 << 31) // 1024 + 300, 256, 1024
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / 16
    y = Product("relu", (), gated=False, only="hopper128").run(x, weight, weight, None, None)
    if y is None:
        pytest.skip("hopper128 does not run on this GPU")
    tail = x[-500:].contiguous()
    assert_right(y[-500:], "relu", False, [tail, weight, weight, None, None])


@pytest.mark.parametrize(
    ("rows", "n", "k", "expected"),
    [
        (1, 4096, 4096, ("stream", "decode", "hopper192", "hopper128")),
        (16, 4096, 4096, ("stream", "hopper192", "hopper128")),
        (128, 4096, 4096, ("hopper192", "hopper128")),
        (1, 4097, 4096, ("stream", "decode")),
        (1, 4096, 4097, ()),
        (64, 4096, 4097, ("triton128", "triton64")),
        (512, 4096, 128, ("triton128", "triton64")),
    ],
)
def test_which_kernels_compute_a_size(rows, n, k, expected):
    if not hopper.serves(0):
        pytest.skip("not a Hopper GPU")
    assert implementations(0, rows.bit_length(), torch.empty(n, k, dtype=torch.bfloat16)) == expected
