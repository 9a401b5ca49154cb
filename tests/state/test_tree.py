"""The tree: taken apart and put together, copied, selected, merged, compared, described."""

from __future__ import annotations

import collections
import copy
import enum
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftproof.state.tree import compare, copy_tree, describe, flatten, merge, select, to_device, unflatten, without
from tests.state.trees import ARRAY_DTYPES, TENSOR_DTYPES, example, trees


def through_json(tree):
    tensors, plain = flatten(tree)
    return unflatten(tensors, json.loads(json.dumps(plain, allow_nan=False)))


@given(trees)
def test_round_trip(tree):
    restored = through_json(tree)
    assert compare(tree, restored) == []
    assert describe(tree) == describe(restored)


@given(trees)
def test_paths_are_unique_and_fit_for_files(tree):
    tensors, _ = flatten(tree)
    leaves = [leaf for leaf in describe(tree) if leaf.kind in ("tensor", "array", "scalar", "bytes")]
    assert len({leaf.path for leaf in leaves}) == len(leaves)
    assert set(tensors) == {leaf.path for leaf in leaves if leaf.same_as is None}
    for path in tensors:
        assert path != "__metadata__"
        path.encode("utf-8")


def test_paths_read_like_the_tree():
    a, b, c, d = (torch.full((), float(i)) for i in range(4))
    tensors, _ = flatten({"policy": {"core.weight_ih_l0": a}, "optimizer": {"state": {0: b, "0": c}}, "list": [d]})
    assert list(tensors) == ["policy/core.weight_ih_l0", "optimizer/state/0", "optimizer/state/'0", "list/0"]
    assert [tensor.item() for tensor in tensors.values()] == [0, 1, 2, 3]


def test_keys_keep_their_types():
    tree = {"a": {1: "int", "1": "str", 2: "two", 2.5: "float", None: "none", "None": "text"}, "b": {True: 0}}
    restored = through_json(tree)
    assert restored == tree
    assert [type(key) for key in restored["a"]] == [int, str, int, float, type(None), str]
    assert list(restored["b"]) == [True]
    assert list(map(type, restored["b"])) == [bool]


def test_slashes_and_escapes_do_not_collide():
    tensors, _ = flatten(
        {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a%2Fb": torch.ones(2), "%2525": torch.ones(3)}
    )
    assert len(tensors) == 4


def test_one_tensor_comes_back_as_one_and_views_apart():
    tree = through_json(example())
    assert tree["shared"]["first"] is tree["shared"]["second"]
    assert len(flatten(example())[0].keys() & {"shared/first", "shared/second"}) == 1
    assert tree["shared"]["transposed"] is not tree["shared"]["first"]
    array = np.arange(4.0)
    restored = through_json([array, array, array[:2]])
    assert restored[0] is restored[1]
    assert restored[2].tolist() == [0, 1]


def test_views_of_one_start_with_different_shapes_are_kept_apart():
    base = torch.arange(6.0)
    restored = through_json([base, base[:3], base.reshape(2, 3), base.view(torch.int32)])
    assert [tuple(tensor.shape) for tensor in restored] == [(6,), (3,), (2, 3), (6,)]
    assert restored[3].dtype == torch.int32
    square, array = base[:4].view(2, 2), np.arange(4).reshape(2, 2)
    assert [x.tolist() for x in through_json([square, square.T, array, array.T])] == [
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
    ] * 2
    turned = torch.tensor([1 + 2j])
    assert through_json([turned, turned.conj()])[1].tolist() == [1 - 2j]


@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
def test_tensor_dtypes(dtype):
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    restored = through_json({"x": tensor, "scalar": tensor[1], "empty": tensor[:0]})
    assert restored["x"].dtype == dtype
    assert compare({"x": tensor, "scalar": tensor[1], "empty": tensor[:0]}, restored) == []
    (difference,) = compare(tensor, torch.tensor([0, 0, 1]).to(dtype))
    assert difference.kind == "value"
    assert difference.max_abs == 1


@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=str)
def test_arrays_and_scalars_stay_numpy(dtype):
    array = np.array([0, 1, 1]).astype(dtype)
    restored = through_json([array, array[1], np.array(1, dtype), array[:0]])
    assert [isinstance(value, np.ndarray) for value in restored] == [True, False, True, True]
    assert isinstance(restored[1], np.generic)
    assert [value.dtype for value in restored] == [dtype] * 4
    assert [value.shape for value in restored] == [(3,), (), (), (0,)]
    restored[0][0] = 1  # writable


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, -0.0, 5e-324, 2**53, -(2**53), 2**128 - 1, pytest.param(10**5000, id="huge")],
)
def test_numbers_are_exact(value):
    restored = through_json({"x": value})["x"]
    assert type(restored) is type(value)
    assert repr(restored) == repr(value) if isinstance(value, float) else restored == value


class Colour(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (Colour.RED, "Colour"),
        (Pair(1, 2), "Pair"),
        (torch.Size([1]), "torch.Size"),
        (1j, "complex"),
        (torch.float32, "torch.dtype"),
        (np.array(["text"]), "dtype <U4"),
        (np.array([None]), "dtype object"),
        (np.str_("text"), "dtype <U4"),
        (np.zeros(2, ">f4"), "dtype >f4"),
        (np.zeros(2, [("a", "f4")]), "dtype"),
        (np.ma.zeros(2), "MaskedArray"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.empty(2, dtype=torch.float8_e8m0fnu), "float8_e8m0fnu"),
        (torch.nn.LazyLinear(2).weight, "without a shape"),
        ({(1, 2): 0}, "key of type tuple"),
        ({math.nan: 0}, "nan"),
        ({2**63: 0}, "64 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("function", [flatten, copy_tree], ids=["flatten", "copy_tree"])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_foreign_values_are_named(value, words, function):
    with pytest.raises(TypeError, match="a/0/b.*" + words):
        function({"a": [{"b": value}]})


def test_a_tree_that_contains_itself_is_refused():
    tree: dict = {}
    tree["self"] = tree
    for function in (flatten, copy_tree, describe, lambda tree: compare(tree, tree)):
        with pytest.raises(ValueError, match="contain itself"):
            function(tree)


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({"$tensor": "y"}, "refers to 'y'"),
        ({"$tensor": 3}, "not a reference"),
        ({"$tensor": "x", "more": 1}, "not a reference"),
        ({"$tensor": "x", "dtype": "complex64"}, "not a reference"),
        ({"$tensor": "x", "dtype": "complex128"}, "no pairs"),
        ({"$scalar": "x"}, "scalar of shape"),
        ({"$bytes": "x"}, "bytes of shape"),
        ({"$array": "half"}, "NumPy has no"),
        ({"$strange": 1}, "unknown tag"),
        ({"$tuple": 1}, "without a list"),
        ({"$tuple": [], "b": 1}, "more than the tag"),
        ({"$dict": [[1]]}, "without a list of pairs"),
        ({"$dict": {"a": 1}}, "without a list of pairs"),
        ({"$dict": [[1, 2], [1, 3]]}, "twice"),
        ({"$dict": [[[1], 2]]}, "key of type list"),
        ({"$dict": [[{"$float": "nan"}, 2]]}, "nan"),
        ({"$int": "12"}, "not an int"),
        ({"$int": "0x_1"}, "not an int"),
        ({"$float": "1.0"}, "not a float"),
        ({"$float": {}}, "not a float"),
        (2**53, "not a plain value"),
        (math.inf, "not a plain value"),
        ((1, 2), "not a plain value"),
        ({1: 2}, "not strings"),
    ],
    ids=str,
)
def test_unflatten_takes_nothing_else(plain, words):
    tensors = {"x": torch.zeros(3), "half": torch.zeros(2, dtype=torch.bfloat16)}
    used = [{"$tensor": name} for name in tensors]
    with pytest.raises(ValueError, match=f"'here/0'.*{words}"):
        unflatten(tensors, {"used": used, "here": [plain]})


def test_unflatten_wants_every_tensor_used():
    with pytest.raises(ValueError, match="no place in the tree: 'x'"):
        unflatten({"x": torch.zeros(1)}, {})


@given(trees)
def test_copy_equals_and_shares_nothing(tree):
    copied = copy_tree(tree)
    assert compare(tree, copied) == []
    assert describe(tree) == describe(copied)


def test_copy_does_not_follow_the_source():
    tree = example()
    tree["policy"]["weight_ih_l0"] = torch.nn.Parameter(tree["policy"]["weight_ih_l0"])
    copied, before = copy_tree(tree), copy.deepcopy(tree)
    for value in (*tree["policy"].values(), *tree["shared"].values()):
        value.data.add_(1)
    tree["normalizer"]["mean"] += 1
    tree["hyperparams"]["lr"] = 0.0
    assert compare(copied, before) == []
    assert not copied["policy"]["weight_ih_l0"].requires_grad
    assert copied["shared"]["first"] is copied["shared"]["second"]


def test_select_and_without():
    tree = {
        "policy": 1,
        "policy.optimizer": 2,
        "rollout": {"state": {"h.x": 3, 0: 4}, "start": 5},
        "a": {"b": {"c": 6}},
    }
    assert select(tree, ["policy"]) == {"policy": 1}
    assert select(tree, ["policy.optimizer"]) == {"policy.optimizer": 2}
    assert select(tree, ["rollout/state/h.x", "rollout.state.0", "a.b"]) == {
        "rollout": {"state": {"h.x": 3, 0: 4}},
        "a": {"b": {"c": 6}},
    }
    assert without(tree, ["rollout/state", "policy", "a"]) == {"policy.optimizer": 2, "rollout": {"start": 5}}
    assert without(tree, ["a", "a.b"]) == without(tree, ["a.b", "a"]) == without(tree, ["a"])
    assert without(tree, []) == tree
    assert tree["rollout"] == {"state": {"h.x": 3, 0: 4}, "start": 5}


@pytest.mark.parametrize("function", [select, without])
def test_unknown_names_list_near_ones(function):
    tree = {"hyperparams": {}, "rollout": {"state": 1}}
    with pytest.raises(KeyError, match=r"no 'rollout/stat'; it has rollout/state"):
        function(tree, ["rollout/stat"])
    with pytest.raises(KeyError, match="it has hyperparams, rollout"):
        function(tree, ["zzz"])
    with pytest.raises(KeyError):
        function(tree, ["rollout/state/deeper"])


def test_merge():
    base, over = {"a": {"x": 1, "y": 2}, "b": 3, "c": {"d": 4}}, {"a": {"y": 5, "z": {"w": 6}}, "c": 7}
    merged = merge(base, over)
    assert merged == {"a": {"x": 1, "y": 5, "z": {"w": 6}}, "b": 3, "c": 7}
    merged["a"]["z"]["w"] = 0
    assert base == {"a": {"x": 1, "y": 2}, "b": 3, "c": {"d": 4}}
    assert over["a"]["z"]["w"] == 6


@given(st.dictionaries(st.text(max_size=3), trees, min_size=1, max_size=5), st.data())
def test_parts_merge_to_the_whole(tree, data):
    from driftproof.state._codec import component

    names = data.draw(st.lists(st.sampled_from([component(key) for key in tree]), unique=True))
    assert compare(merge(select(tree, names), without(tree, names)), tree) == []


def test_compare_names_every_difference():
    a = {"missing": 1, "type": 1, "shape": torch.zeros(2), "dtype": torch.zeros(2), "value": torch.tensor([1.0, 2.0])}
    b = {
        "type": True,
        "shape": torch.zeros(3),
        "dtype": torch.zeros(2).double(),
        "value": torch.tensor([1.0, 2.5]),
        "new": 2,
    }
    found = {difference.path: (difference.kind, difference.max_abs) for difference in compare(a, b)}
    assert found == {
        "missing": ("missing", None),
        "type": ("type", None),
        "shape": ("shape", None),
        "dtype": ("dtype", None),
        "value": ("value", 0.5),
        "new": ("missing", None),
    }
    assert "new: only in the second tree" in map(str, compare(a, b))
    assert "value: 1 numbers differ by up to 0.5" in map(str, compare(a, b))


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (math.nan, -math.nan, True),
        (0.0, -0.0, False),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.tensor([math.nan]), -torch.tensor([math.nan]), True),
        (torch.tensor([math.nan]), torch.tensor([0.0]), False),
        (np.float32(math.nan), np.float32(math.nan), True),
        ([1], (1,), False),
        ([1], [1, 2], False),
        (1, 1.0, False),
        (np.float64(1), 1.0, False),
        ({True: 1}, {1: 1}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        pytest.param(10**5000, 10**5000 + 1, False, id="huge"),
        (b"a", b"b", False),
        (torch.nn.Parameter(torch.ones(2)), torch.ones(2), True),
    ],
    ids=str,
)
def test_equality_is_bitwise_but_for_nan(a, b, equal):
    assert (compare({"x": a}, {"x": b}) == []) == equal


@given(trees, trees)
def test_compare_is_symmetric(a, b):
    assert {d.path for d in compare(a, b)} == {d.path for d in compare(b, a)}


def test_describe():
    shared = torch.zeros(2, 3)
    leaves = describe({"a": shared, "b": [shared, np.float32(1)], "c": {"d": "text", "e": 2**100}, "f": b"xy"})
    assert [(leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.bytes, leaf.same_as) for leaf in leaves] == [
        ("a", "tensor", "float32", (2, 3), 24, None),
        ("b/0", "tensor", "float32", (2, 3), 0, "a"),
        ("b/1", "scalar", "float32", (), 4, None),
        ("c/d", "str", None, None, 4, None),
        ("c/e", "int", None, None, 13, None),
        ("f", "bytes", None, None, 2, None),
    ]


def test_to_device():
    tree = example()
    moved = to_device(tree, "meta")
    assert moved["policy"]["weight_ih_l0"].device.type == "meta"
    assert moved["shared"]["first"] is moved["shared"]["second"]
    assert moved["normalizer"]["mean"] is tree["normalizer"]["mean"]
    assert compare(to_device(tree, "cpu"), tree) == []


@pytest.mark.gpu
def test_devices_do_not_count_in_comparisons():
    tree = example()
    on_gpu = to_device(tree, "cuda")
    assert compare(tree, on_gpu) == []
    assert copy_tree(on_gpu)["policy"]["weight_ih_l0"].is_cuda
