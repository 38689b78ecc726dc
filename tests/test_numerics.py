import dataclasses
import math
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxfuse.numerics import excess, judge, reference

X, WEIGHT, BIAS = torch.randn(16, 64), torch.randn(48, 64) / 8, torch.randn(48)


@pytest.fixture(autouse=True)
def seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def linear_case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Eager's answer, the exact one, and the magnitude |x| |W|^T + |b|."""
    x, weight, bias = (t.to(dtype) for t in (X, WEIGHT, BIAS))
    e = F.linear(x, weight, bias)
    x, weight, bias = (t.double() for t in (x, weight, bias))
    return e, F.linear(x, weight, bias), F.linear(x.abs(), weight.abs(), bias.abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_eager_itself_is_right(dtype):
    e, r, magnitude = linear_case(dtype)
    verdict = excess(e, e, r, magnitude)
    assert verdict
    assert verdict.reason == ""
    assert verdict.norm_used <= 0.5
    assert verdict.element_used <= 0.5


def test_another_order_of_summation_is_right():
    e, r, magnitude = linear_case()
    y = F.linear(X.flip(1), WEIGHT.flip(1), BIAS)
    assert not torch.equal(y, e)
    assert excess(y, e, r, magnitude)


def test_a_scaled_answer_is_wrong():
    e, r, magnitude = linear_case()
    verdict = excess(e * (1 + 100 * torch.finfo(torch.float32).eps), e, r, magnitude)
    assert not verdict
    assert verdict.norm_used > 1


def test_one_wrong_element_is_found_and_named():
    e, r, magnitude = linear_case()
    y = e.clone()
    y[3, 5] += 20 * torch.finfo(torch.float32).eps * magnitude[3, 5].item()
    verdict = excess(y, e, r, magnitude)
    assert not verdict
    assert verdict.norm_used < 1 < verdict.element_used
    assert verdict.reason.startswith("element [3, 5] is ")
    assert verdict.reason.endswith("(1 of 768 elements are outside)")


def test_a_drift_inside_each_elements_allowance_is_wrong_in_the_norm():
    e, r, magnitude = linear_case()
    y = e + 6 * torch.finfo(torch.float32).eps * magnitude.float()
    verdict = excess(y, e, r, magnitude)
    assert not verdict
    assert verdict.element_used < 1 < verdict.norm_used
    assert verdict.reason.startswith("the norm of the error is ")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda e: e.double(), "dtype is torch.float64, eager's is torch.float32"),
        (lambda e: e[:, :-1], "shape is torch.Size([16, 47]), eager's is torch.Size([16, 48])"),
        (lambda e: e.to("meta"), "device is meta, eager's is cpu"),
        (lambda e: e.index_fill(0, torch.tensor(2), math.nan), "NaN in 48 elements, in eager's answer in 0; 48 differ"),
        (
            lambda e: e.index_fill(0, torch.tensor(2), math.inf),
            "+inf in 48 elements, in eager's answer in 0; 48 differ",
        ),
    ],
)
def test_the_reason_is_given(wrong, reason):
    e, r, magnitude = linear_case()
    assert excess(wrong(e), e, r, magnitude).reason == reason


def test_nan_and_inf_where_eager_has_them_are_right():
    e, r, magnitude = linear_case()
    for tensor in (e, r):
        tensor[1, 2], tensor[3, 4], tensor[5, 6] = math.nan, math.inf, -math.inf
    assert excess(e.clone(), e, r, magnitude)
    moved = e.clone()
    moved[1, 2], moved[1, 3] = moved[1, 3].item(), math.nan
    assert excess(moved, e, r, magnitude).reason == "NaN in 1 elements, in eager's answer in 1; 2 differ"
    flipped = e.clone()
    flipped[3, 4] = -math.inf
    assert excess(flipped, e, r, magnitude).reason == "+inf in 0 elements, in eager's answer in 1; 1 differ"


def test_the_rest_is_still_judged_beside_inf():
    e, r, magnitude = linear_case()
    for tensor in (e, r):
        tensor[1, 2] = math.inf
    y = e.clone()
    y[0, 0] += 1
    assert "element [0, 0]" in excess(y, e, r, magnitude).reason


def test_float64_is_held_to_eager():
    e, r, magnitude = linear_case(torch.float64)
    eps = torch.finfo(torch.float64).eps
    assert excess(e + 2 * eps * magnitude, e, r, magnitude)
    assert not excess(e + 20 * eps * magnitude, e, r, magnitude)
    # An eager that misses widely leaves no more room.
    assert not excess(e + 20 * eps * magnitude, e, r + 1, magnitude)


def test_integers_must_be_equal():
    e = torch.arange(6)
    assert excess(e.clone(), e, e, e)
    assert excess(e + (e == 2), e, e, e).reason == "1 of 6 elements differ from eager's"


def test_empty_and_complex():
    empty = torch.empty(0, 3)
    assert excess(empty, empty, empty.double(), empty.double())
    e = torch.randn(4, dtype=torch.complex64)
    assert excess(e, e, e.to(torch.complex128), e.abs().double())
    assert not excess(e * 1.001, e, e.to(torch.complex128), e.abs().double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tanh_gelu_for_erf_gelu_is_wrong(dtype):
    model = Ffn().to(dtype)
    graph_module, x = fx.symbolic_trace(model), X.to(dtype)
    r, magnitude = reference(graph_module, (x,))
    e = model(x)
    assert judge(e.clone(), e, r, magnitude)
    y = model.down(F.gelu(model.up(x), approximate="tanh"))
    assert "float64 has" in judge(y, e, r, magnitude).reason


def test_structures_are_judged_leaf_by_leaf():
    e, r, magnitude = linear_case()
    tree = {"a": e, "b": (e, 3)}
    exact, scales = {"a": r, "b": (r, 3)}, {"a": magnitude, "b": (magnitude, 3)}
    assert judge({"a": e, "b": (e, 3)}, tree, exact, scales)
    assert judge({"a": e, "b": (e + 1, 3)}, tree, exact, scales).reason.startswith("output 1: element ")
    assert judge({"a": e, "b": (e, 4)}, tree, exact, scales).reason == "output 2: is 4, eager's is 3"
    assert judge({"a": e, "b": (None, 3)}, tree, exact, scales).reason.startswith("output 1: ")
    assert judge((e, e, 3), tree, exact, scales).reason.startswith("the output is ")


# Magnitudes: what each op's spelling gives, on positive and negative operands.

A, B, M = torch.randn(6, 8), torch.randn(6, 8), torch.randn(8, 4)
a, b, m = A.double().abs(), B.double().abs(), M.double().abs()
AM = A.double() @ M.double()

MAGNITUDES = {
    "matmul": (lambda x, y, w: x @ w, lambda: a @ m),
    "method": (lambda x, y, w: x.mm(w), lambda: a @ m),
    "linear": (lambda x, y, w: F.linear(x, w.t(), w[:, 0][:4]), lambda: a @ m + m[:4, 0]),
    "addmm": (lambda x, y, w: torch.addmm(w[0], x, w, beta=-2, alpha=-0.5), lambda: 2 * m[0] + a @ m / 2),
    "einsum": (lambda x, y, w: torch.einsum("ik,kn->in", x, w), lambda: a @ m),
    "a product's output is an operand": (lambda x, y, w: (x @ w) @ w.t(), lambda: AM.abs() @ m.t()),
    "add": (lambda x, y, w: torch.add(x, y, alpha=-2), lambda: a + 2 * b),
    "add in place": (lambda x, y, w: x.add_(y), lambda: a + b),
    "add to a number": (lambda x, y, w: x + 3, lambda: a + 3),
    "sub": (lambda x, y, w: x - y, lambda: a + b),
    "mul": (lambda x, y, w: x * y, lambda: 2 * a * b),
    "mul by a number": (lambda x, y, w: x * -3, lambda: 3 * a + 3 * a),
    "mul by a mask": (lambda x, y, w: x * (y > 0), lambda: 2 * a * (B > 0)),
    "product of masks": (lambda x, y, w: (x > 0) * (y > 0) * x, lambda: 3 * a * ((A > 0) & (B > 0))),
    "div": (lambda x, y, w: x / y, lambda: 2 * a / b),
    "pow": (lambda x, y, w: x**3, lambda: 3 * a**3),
    "square": (lambda x, y, w: x.square(), lambda: 2 * a**2),
    "neg": (lambda x, y, w: -x, lambda: a),
    "activation": (lambda x, y, w: F.gelu(x @ w), lambda: a @ m),
    "bounded activation": (lambda x, y, w: torch.sigmoid(10 * (x @ w)), lambda: 10 * (a @ m + AM.abs())),
    "view": (lambda x, y, w: (x - y).view(2, 24).transpose(0, 1), lambda: (a + b).view(2, 24).t()),
    "chunk": (lambda x, y, w: (x - y).chunk(2, dim=-1)[1], lambda: (a + b)[:, 4:]),
    "attribute": (lambda x, y, w: (x - y).T, lambda: (a + b).T),
    "cat": (lambda x, y, w: torch.cat([x - y, y], dim=0), lambda: torch.cat([a + b, b])),
    "cast": (lambda x, y, w: (x - y).to(torch.bfloat16).float(), lambda: a + b),
    "sizes": (lambda x, y, w: (x - y).reshape(x.size(1), x.shape[0]), lambda: (a + b).reshape(8, 6)),
    "rows of a cumulative sum": (lambda x, y, w: torch.cumsum(x, -1), lambda: _rows(A.double().cumsum(-1).abs())),
}  # fmt: skip


def _rows(value: Tensor) -> Tensor:
    return torch.maximum(value, value.square().mean(-1, keepdim=True).sqrt())


@pytest.mark.parametrize("spelling", MAGNITUDES)
def test_magnitudes(spelling):
    function, expected = MAGNITUDES[spelling]
    inputs = (A.clone(), B.clone(), M.clone())
    r, magnitude = reference(fx.symbolic_trace(function), inputs)
    torch.testing.assert_close(magnitude, torch.maximum(expected(), r.abs()))
    assert r.dtype is magnitude.dtype is torch.float64
    assert torch.equal(inputs[0], A)


def test_an_in_place_op_changes_the_magnitude_of_what_it_wrote_to():
    def written(x, y, w):
        h = x * 1.0
        h += y
        h.mul_(2.0)
        return h

    graph = fx.Graph()
    x, y, _ = (graph.placeholder(name) for name in "xyw")
    h = graph.call_function(torch.mul, (x, 1.0))
    graph.call_method("add_", (h, y))
    graph.output(h)
    r, magnitude = reference(fx.GraphModule({}, graph), (A, B, M))
    torch.testing.assert_close(r, A.double() + B.double())
    torch.testing.assert_close(magnitude, 2 * a + b)


@dataclasses.dataclass
class Output(dict):
    """As those of transformers: a dict of the fields that are not None, which pytree takes apart."""

    logits: Tensor | None = None
    states: Tensor | None = None

    def __post_init__(self):
        self.update({name: value for name, value in vars(self).items() if value is not None})


def test_a_dataclass_that_is_a_dict_is_judged_by_its_items():
    def opened(output):
        return list(output.values()), list(output)

    pytree.register_pytree_node(Output, opened, lambda values, names: Output(**dict(zip(names, values, strict=True))))
    graph = fx.Graph()
    x = graph.placeholder("x")
    none = graph.call_function(operator.getitem, ((None,), 0))
    output = graph.call_function(Output, (), {"logits": graph.call_function(torch.mul, (x, 2.0)), "states": none})
    graph.output(output)
    r, magnitude = reference(fx.GraphModule({}, graph), (A,))
    assert judge(Output(A * 2), Output(A * 2), r, magnitude)
    assert not judge(Output(A * 2 + 1), Output(A * 2), r, magnitude)


@pytest.mark.parametrize("of_tensor", [True, False])
def test_an_assignment_changes_the_magnitude_of_items(of_tensor):
    graph = fx.Graph()
    x, y, _ = (graph.placeholder(name) for name in "xyw")
    h = graph.call_function(torch.zeros_like, (x,))
    product = graph.call_function(torch.mul, (y, -3.0))
    mask = graph.call_function(torch.gt, (y, 0.0))
    graph.call_function(operator.setitem, (h, slice(0, 2), graph.call_function(operator.getitem, (product, slice(2)))))
    graph.call_function(operator.setitem, (h, mask, graph.call_function(torch.sum, (x,)) if of_tensor else -5.0))
    graph.output(h)
    r, magnitude = reference(fx.GraphModule({}, graph), (A, B, M))
    expected = torch.where(torch.arange(6)[:, None] < 2, 6 * b, 0.0)
    torch.testing.assert_close(magnitude, expected.masked_fill(B > 0, a.sum() if of_tensor else 5.0))
    torch.testing.assert_close(r[B > 0], torch.full_like(r[B > 0], A.double().sum() if of_tensor else -5.0))


def test_leaf_modules_and_attributes():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act, self.norm = nn.Linear(8, 4), nn.GELU(), nn.LayerNorm(4)
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("shift", torch.randn(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.act(self.linear(x)) @ self.weight + self.shift
            return h, self.norm(h)

    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (h, norm), (h_scale, norm_scale) = reference(fx.symbolic_trace(model), (A,))
    exact = model.double()
    e = exact(A.double())
    torch.testing.assert_close((h, norm), e, rtol=1e-12, atol=1e-12)
    activated = exact.act(exact.linear(A.double()))
    torch.testing.assert_close(
        h_scale, torch.maximum(activated.abs() @ exact.weight.abs() + exact.shift.abs(), h.abs())
    )
    # The scale of h over the deviation of its row, and of nothing else: at least that of the row that comes out.
    deviation = e[0].std(-1, correction=0, keepdim=True)
    assert (norm_scale >= _rows(e[1].abs()) - 1e-12).all()
    assert (norm_scale >= h_scale / deviation * exact.norm.weight.abs() * (1 - 1e-4)).all()
    for name, tensor in before.items():
        assert torch.equal(tensor.double(), exact.state_dict()[name])


def test_the_reference_is_float64_whatever_the_graph_casts():
    def mixed(x: Tensor) -> Tensor:
        h = x.half().to(torch.bfloat16) * torch.ones(8, dtype=torch.float16)
        return h.float() + torch.zeros(8)

    r, _ = reference(fx.symbolic_trace(mixed), (A,))
    assert torch.equal(r, A.double())


def test_arguments_by_name_and_default():
    def scaled(x: Tensor, scale: float = 2.0, shift: float = 0.0) -> Tensor:
        return x * scale + shift

    graph_module = fx.symbolic_trace(scaled)
    assert torch.equal(reference(graph_module, (A,))[0], A.double() * 2)
    assert torch.equal(reference(graph_module, (A,), {"shift": 1.0})[0], A.double() * 2 + 1)
    assert torch.equal(reference(graph_module, (), {"x": A, "scale": 3.0})[0], A.double() * 3)


def test_an_exported_program():
    model = Ffn()
    r, magnitude = reference(torch.export.export(model, (X,)).module(), (X,))
    traced = reference(fx.symbolic_trace(model), (X,))
    torch.testing.assert_close(r, traced[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(magnitude, traced[1], rtol=1e-12, atol=1e-12)


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor | None = None


def test_dataclass_outputs_are_judged_field_by_field():
    x = torch.randn(3, 4)
    r, magnitude = reference(fx.symbolic_trace(lambda x: Pair(x * 2)), [x])
    assert judge(Pair(x * 2), Pair(x * 2), r, magnitude)
    assert "element" in judge(Pair(x * 2 + 1), Pair(x * 2), r, magnitude).reason
    assert not judge(Pair(x * 2, x), Pair(x * 2), r, magnitude)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(x.size()[:-1] + (2, 2)),
        lambda x: x.reshape(x.shape[0] * 2, -1),
        lambda x: x * (x.size(0) - 1) / x.shape[-1],
    ],
    ids=["sizes joined", "size times a number", "size in a product"],
)
def test_arithmetic_on_sizes_is_none_on_tensors(function):
    x = torch.randn(3, 4)
    r, magnitude = reference(fx.symbolic_trace(function), [x])
    assert judge(function(x), function(x), r, magnitude)
    assert not judge(function(x) * 1.001, function(x), r, magnitude)


def test_glu_has_the_scale_of_its_projection():
    x, w = torch.randn(5, 16), torch.randn(8, 16)
    graph = fx.symbolic_trace(lambda x, w: F.glu(F.linear(x, w)))
    r, magnitude = reference(graph, [x, w])
    a = F.linear(x.double(), w.double()).chunk(2, -1)[0]
    assert (magnitude >= a.abs()).all()
    gate, up = w[4:], w[:4]
    assert judge(F.linear(x, up) * torch.sigmoid(F.linear(x, gate)), F.glu(F.linear(x, w)), r, magnitude)
    assert not judge(F.linear(x, gate) * torch.sigmoid(F.linear(x, up)), F.glu(F.linear(x, w)), r, magnitude)


def test_a_saturated_activation_keeps_the_scale_of_its_projection():
    # what sigmoid adds up may be large and cancel: its error is that of the sum, not that of a number below 1
    x, w, b = torch.randn(64, 256), torch.randn(256, 256), torch.randn(256)
    graph = fx.symbolic_trace(lambda x, w, b: torch.sigmoid(x @ w + b))
    r, magnitude = reference(graph, [x, w, b])
    ours, eager = torch.sigmoid(F.linear(x, w.t(), b)), torch.sigmoid(x @ w + b)
    assert judge(ours, eager, r, magnitude)
    assert not judge(torch.sigmoid(F.linear(x, w.t())), eager, r, magnitude)


AMPLIFYING = {
    "softmax": (lambda x: torch.softmax(x, -1), (6, 8)),
    "layer norm": (lambda x: F.layer_norm(x, (8,), torch.full((8,), 0.5).to(x), torch.ones(8).to(x)), (6, 8)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x * 2, x.flip(-1)), (2, 6, 8)),
    "causal attention": (lambda x: F.scaled_dot_product_attention(x, x * 2, x, is_causal=True), (2, 6, 8)),
}


@pytest.mark.parametrize("name", AMPLIFYING)
def test_the_scale_of_what_amplifies_covers_what_an_error_of_its_operands_does(name):
    """And is no wild guess: the worst of many errors of relative size eps comes near to it."""
    function, shape = AMPLIFYING[name]
    x = 4 * torch.randn(shape, dtype=torch.float64)
    r, magnitude = reference(fx.symbolic_trace(function), [x])
    eps, worst = 1e-7, torch.zeros_like(r)
    for _ in range(300):
        error = (function(x * (1 + eps * torch.empty_like(x).uniform_(-1, 1).sign())) - r).abs()
        worst = torch.maximum(worst, error)
    share = worst / (eps * magnitude)
    assert share.max() <= 1.01
    assert share.max() > 0.02
