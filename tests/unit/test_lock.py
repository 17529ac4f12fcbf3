"""A lock keeps a decision: it refuses to differ, says what moved, and no file breaks it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from attn_core.costs import store
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass
from attn_core.costs.workload import Workload
from attn_core.errors import LockError, UsageError
from attn_core.integrations.choice import check_lock, choose
from attn_core.integrations.transformers import select_for
from attn_core.plugins.registry import Registry
from attn_core.selection.lock import Chosen, Lock
from attn_core.selection.moves import changes, moves, require
from attn_core.selection.result import Overrides
from attn_core.selection.solver import select
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from hypothesis import given
from hypothesis import strategies as st

LAYER = LayerRequirements(num_q_heads=8, num_kv_heads=2, head_dim=64)
NEEDS = Requirements(layers=(LAYER,))
BOTH = frozenset({Phase.PREFILL, Phase.DECODE})
SMALL = Workload(prompts={64: 1}, requests={1: 1}, output=2)
SIZES = {"prefill": Pass.even("prefill", 1, 64, 64), "decode": Pass.even("decode", 1, 65, 1)}


def row(priority, **fields):
    plain = {"kind": "mha", "device": "acme", "dtypes": {"bf16"}, "kv_dtypes": {"bf16"}}
    return Capabilities(**plain | {"priority": priority, "page_sizes": {16}} | fields)


def registry(**rows):
    specs = (BackendSpec(name=n, capabilities=[r], create="x:Y") for n, r in rows.items())
    return Registry({("softmax", spec.name): spec for spec in specs})


def profile(**times):
    form = Form(q_heads=8, kv_heads=2, head_dim=64, v_head_dim=64, page_size=16)
    return Profile(
        costs={
            Key(name, "", form, size): Cost(us, us, us, 0.0)
            for name, us in times.items()
            for size in SIZES.values()
        }
    )


def locked(of, needs=NEEDS, libraries=None, environment=None, costs=None, **options):
    libraries = {} if libraries is None else libraries
    costs = costs or Profile()
    found = select(
        needs, Device("acme"), of, libraries, Overrides(**options), costs, workload=SMALL
    )
    return Lock.of(found, {"acme": "1"} if environment is None else environment, costs, SMALL)


PLAIN = registry(fast=row(30, requires=["fastlib>=2"]), slow=row(20))
HERE = {"fastlib": "2.1"}


def test_a_lock_survives_its_file():
    spec = replace(NEEDS, speculation=Speculation(topk=1))
    able = registry(fast=row(30, max_verify_topk=1), slow=row(20, max_verify_topk=1))
    for lock in (
        locked(PLAIN, libraries=HERE),
        locked(able, spec),
        locked(PLAIN, libraries=HERE, costs=profile(fast=9.5, slow=12.25)),
    ):
        again = Lock.from_json(json.loads(json.dumps(lock.to_json())))
        assert again == lock
        assert require(lock, again) == []


def test_the_same_decision_elsewhere_is_accepted_and_says_what_changed():
    lock = locked(PLAIN, libraries=HERE, environment={"torch": "2.8", "driver": "1"})
    now = locked(PLAIN, libraries=HERE, environment={"torch": "2.9", "fastlib": "2"})
    assert require(lock, now) == [
        "driver was 1 and is absent",
        "fastlib was absent and is 2",
        "torch was 2.8 and is 2.9",
    ]


def test_how_many_layers_there_are_is_no_part_of_a_lock():
    """A lock from before they were counted is the same, as is one of a part of the layers."""
    counted = replace(NEEDS, layers=(replace(LAYER, num_layers=28),))
    now = locked(PLAIN, counted, libraries=HERE)
    assert now.asked["layer 0"] == "kind mha, head_dim 64, num_q_heads 8, num_kv_heads 2"
    assert require(locked(PLAIN, libraries=HERE), now) == []


def why(old, new, what="decode"):
    [move] = [m for m in moves(old, new) if m.what == what]
    return move.then.choice, move.now.choice, move.why


def test_a_library_that_no_longer_fits():
    """The libraries of the two backends are named with the choice, others only in the end."""
    old = locked(PLAIN, libraries=HERE, environment={"fastlib": "2.1", "torch": "2.8"})
    new = locked(
        PLAIN, libraries={"fastlib": "1.9"}, environment={"fastlib": "1.9", "torch": "2.9"}
    )
    refused = "fast does not fit: fastlib 1.9 (needs fastlib>=2)"
    assert why(old, new) == ("fast", "slow", (refused, "fastlib was 2.1 and is 1.9"))
    assert why(new, old) == (
        "slow", "fast",
        ("fast did not fit: fastlib 1.9 (needs fastlib>=2)", "fastlib was 1.9 and is 2.1"),
    )  # fmt: skip
    with pytest.raises(LockError) as error:
        require(old, new, "lock a.lock")
    text = str(error.value)
    for part in ("lock a.lock", "decode: fast", "→ slow", refused, "changed: torch was 2.8"):
        assert part in text


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"slow": row(40)}, "slow had priority 20 and has 40"),
        ({"fast": row(10)}, "fast had priority 30 and has 10"),
        ({"newer": row(50)}, "newer was not declared"),
        ({"fast": row(30, dtypes={"fp16"})}, "fast has another row"),
        ({"fast": row(30, head_dims={128})}, "fast does not fit: head_dim 64 (supports 128)"),
        ({"fast": None}, "fast is not declared any more"),
    ],
)
def test_a_row_that_changed(rows, said):
    plain = {"fast": row(30), "slow": row(20)}
    after = {n: r for n, r in (plain | rows).items() if r is not None}
    _, _, text = why(locked(registry(**plain)), locked(registry(**after)))
    assert any(line.startswith(said) for line in text), text


def test_a_cost_that_changed():
    plain = registry(fast=row(30), slow=row(20))
    before, after = profile(fast=10.0, slow=20.0), profile(fast=30.0, slow=20.0)
    old, new = locked(plain, costs=before), locked(plain, costs=after)
    then, now, text = why(old, new)
    assert (then, now) == ("fast", "slow")
    decoded = "fast took 20.0 µs and takes 60.0 µs per request and layer, by what was measured"
    assert text == (decoded,)
    assert changes(old, new) == [f"profile was {before.digest} and is {after.digest}"]
    unmeasured = locked(plain)
    _, _, text = why(unmeasured, new)
    assert text[0].startswith("fast took an unknown time and takes 60.0 µs")


def test_backends_by_pass_belong_to_the_decision():
    plain = registry(fast=row(30), slow=row(20))
    old = locked(plain, costs=profile(fast=10.0))
    new = locked(plain, costs=profile(fast=10.0, slow=20.0))
    moved = {m.what: (m.then, m.now.choice) for m in moves(old, new)}
    assert moved == dict.fromkeys(("by pass: prefill", "by pass: decode"), (None, "slow"))


def test_a_conflict_that_appeared():
    free = {"a": row(30, phases={Phase.PREFILL}), "b": row(30, phases={Phase.DECODE})}
    free["c"] = row(10, phases=BOTH)
    banned = free | {"b": replace(free["b"], bans={"a": "they corrupt one another"})}
    _, now, text = why(locked(registry(**free)), locked(registry(**banned)))
    assert now == "c"
    assert "now in conflict: a (prefill) with b (decode): they corrupt one another" in text


def test_a_page_size_moves_with_its_reason():
    old, new = locked(registry(fast=row(30))), locked(registry(fast=row(30, page_sizes={64})))
    [move] = moves(old, new)
    assert str(move).startswith("page size: 16 (the smallest")
    assert "→ 64 (the smallest" in str(move)


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (replace(NEEDS, deterministic=True), "deterministic was False and is True"),
        (replace(NEEDS, layers=(replace(LAYER, head_dim=128),)), "layer 0 was kind mha, head_dim"),
        (replace(NEEDS, layers=(LAYER, replace(LAYER, sliding_window=9))), "layer 1 was absent"),
        (replace(NEEDS, speculation=Speculation(topk=1)), "speculation was absent"),
    ],
)
def test_a_lock_is_of_one_model(needs, said):
    """Other requirements are refused, although the same backends serve them."""
    able = {"deterministic": True, "max_verify_topk": 1, "sliding_window": True}
    fast = registry(fast=row(30, **able))
    old, new = locked(fast), locked(fast, needs)
    assert moves(old, new) == []
    with pytest.raises(LockError, match="asked: " + said):
        require(old, new)


GOOD = locked(PLAIN, libraries=HERE, costs=profile(fast=9.0)).to_json()
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["prefill", "softmax", "\x1b[2J", "\udcff", "9" * 12_000, 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)  # fmt: skip


def places(data, at=()):
    """Yield the path of every value in plain data."""
    yield at
    for key in data if isinstance(data, dict) else range(len(data)) if type(data) is list else ():
        yield from places(data[key], (*at, key))


@given(st.sampled_from(list(places(GOOD))), JUNK, st.booleans())
def test_any_file_is_a_lock_or_a_usage_error(tmp_path_factory, at, junk, drop):
    data = copy.deepcopy(GOOD)
    spot = data
    for key in at[:-1]:
        spot = spot[key]
    if not at:
        data = junk
    elif drop:
        del spot[at[-1]]
    else:
        spot[at[-1]] = junk
    path = tmp_path_factory.mktemp("lock") / "a.lock"
    path.write_text(json.dumps(data))
    try:
        lock = store.parsed(path, "lock", Lock.from_json)
    except UsageError as error:
        said = str(error)
        assert said.startswith(f"lock {path}: expected "), said  # or it is a lock
        assert len(said) < 1000, said
        return
    good = Lock.from_json(GOOD)
    for one, other in ((lock, good), (good, lock), (lock, lock)):
        assert all(str(m) and m.to_json() for m in moves(one, other))
        changes(one, other)
    assert Lock.from_json(lock.to_json()) == lock


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("lock") / "a.lock"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"a\.lock"):
        store.parsed(path, "lock", Lock.from_json)


def test_what_is_too_large_is_refused(tmp_path):
    data = GOOD | {"conflicts": ["x"] * 5000}
    with pytest.raises(UsageError, match="at most 4096"):
        Lock.from_json(data)
    deep = tmp_path / "deep.lock"
    deep.write_text("[" * 100_000)
    with pytest.raises(UsageError, match="nested too deeply"):
        store.parsed(deep, "lock", Lock.from_json)


SHAPE = ("--num-q-heads", "32", "--num-kv-heads", "8", "--head-dim", "128")
H200 = ("--device", "cuda:sm90", *SHAPE)


def test_the_commands(here, tmp_path):
    first, second = str(tmp_path / "a.lock"), str(tmp_path / "b.lock")
    assert here("lock", first, *H200).returncode == 0
    same = here("select", "--locked", first, *H200)
    assert same.returncode == 0, same.stderr
    upgraded = here("select", "--locked", first, *H200, "--runtime-version", "12.8", "--json")
    assert json.loads(upgraded.stdout)["changed"] == ["runtime was absent and is 12.8"]

    without = (*H200, "--assume-installed", "triton==3.6")
    differs = here("select", "--locked", first, *without)
    assert (differs.returncode, differs.stdout.count("prefill")) == (1, 0)
    assert "fa3 does not fit: flash-attn-3 or sglang-kernel not installed" in differs.stderr
    assert "accept this selection with `attn lock`" in differs.stderr

    assert here("lock", second, *without).returncode == 0
    moved = here("diff", first, second)
    assert moved.returncode == 1
    assert "decode: fa3 " in moved.stdout
    assert "changed: triton was assumed and is 3.6" in moved.stdout
    said = json.loads(here("diff", first, second, "--json").stdout)
    assert [m["what"] for m in said["moved"]][:2] == ["prefill", "decode"]
    assert (here("diff", first, first).returncode, said["asked"]) == (0, [])


def test_a_selection_that_finds_nothing_keeps_its_exit_code(here, tmp_path):
    path = str(tmp_path / "a.lock")
    here("lock", path, *H200)
    assert here("select", "--locked", path, *H200, "--deny", "fa3").returncode == 1
    assert here("select", "--locked", path, *H200, "--allow", "aiter").returncode == 3
    assert here("lock", str(tmp_path / "b.lock"), *H200, "--allow", "aiter").returncode == 3
    assert not (tmp_path / "b.lock").exists()


def test_no_other_file_is_replaced(here, tmp_path):
    mine = tmp_path / "model.json"
    mine.write_text("{}")
    refused = here("lock", str(mine), *H200)
    assert (refused.returncode, mine.read_text()) == (2, "{}")
    assert "expected schema 1" in refused.stderr
    assert here("lock", str(tmp_path / "no" / "a.lock"), *H200).returncode == 2
    assert here("lock", str(tmp_path), *H200).returncode == 2


def test_the_lock_of_this_machine(here, tmp_path, monkeypatch):
    path = str(tmp_path / "a.lock")
    done = here("lock", path, *SHAPE)
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "a.lock").read_text())
    assert {"device", "torch", "attn-core", "threads"} <= kept["environment"].keys()
    monkeypatch.setenv("ATTN_LOCKED", path)
    assert here("select", *SHAPE).returncode == 0
    assert here("select", *SHAPE, "--page-size", "64").returncode == 1


def in_an_engine(lock, tmp_path, of=PLAIN, needs=NEEDS, without=(), libraries=HERE):
    """Compare a selection for `needs`, without some roles, with a lock that a variable names."""
    path = tmp_path / "a.lock"
    path.write_text(json.dumps(lock.to_json()))
    device = Device("acme")
    found = select(needs, device, of, libraries, profile=Profile(), workload=SMALL)
    roles = {role: c for role, c in found.roles.items() if role not in without}
    check_lock(replace(found, roles=roles), of, device, Profile(), str(path))


def test_an_engine_asks_in_its_own_words(tmp_path):
    able = registry(fast=row(30, cuda_graph="full", max_verify_topk=1), slow=row(20))
    lock = locked(able)
    for asked in ({"graphs": True}, {"page_size": 16}, {"speculation": Speculation(topk=1)}):
        in_an_engine(lock, tmp_path, able, replace(NEEDS, **asked))


def test_an_engine_refuses_what_moved(tmp_path):
    lock = locked(PLAIN, libraries=HERE)
    with pytest.raises(LockError, match=r"a\.lock(.|\n)*fast.*→ slow") as error:
        in_an_engine(lock, tmp_path, libraries={"fastlib": "1.9"})
    assert "fast does not fit: fastlib 1.9 (needs fastlib>=2)" in str(error.value)
    with pytest.raises(LockError, match=r"page size: 16 .*→ 32"):
        in_an_engine(lock, tmp_path, needs=replace(NEEDS, page_size=32))


def test_a_part_of_a_model_is_compared_by_its_own_roles(tmp_path):
    lock = locked(PLAIN, libraries=HERE)
    lock = replace(lock, decision={**lock.decision, "decode": Chosen("other")})
    with pytest.raises(LockError, match="decode: other"):
        in_an_engine(lock, tmp_path)
    in_an_engine(lock, tmp_path, without={"decode"})
    lock = replace(lock, decision={n: c for n, c in lock.decision.items() if n != "prefill"})
    with pytest.raises(LockError, match="prefill: nothing → fast"):
        in_an_engine(lock, tmp_path, without={"decode"})


def test_the_adapters_read_the_variable(tmp_path, monkeypatch):
    config = {
        "model_type": "llama", "hidden_size": 128, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_hidden_layers": 1, "torch_dtype": "float32",
    }  # fmt: skip
    here = torch.device("cpu")
    needs = replace(NEEDS, dtype="fp32", page_size=16)

    def engine():
        return choose(needs, here)[0]

    def model():
        return select_for(config, dtype=torch.float32, device=here)

    path = tmp_path / "a.lock"
    for adapter in (engine, model):
        monkeypatch.delenv("ATTN_LOCKED", raising=False)
        data = Lock.of(adapter(), {}, Profile(), Workload()).to_json()
        path.write_text(json.dumps(data))
        monkeypatch.setenv("ATTN_LOCKED", str(path))
        adapter()
        data["decision"]["decode"]["choice"] = "nobody"
        path.write_text(json.dumps(data))
        with pytest.raises(LockError, match="decode: nobody"):
            adapter()
        path.write_text("{")
        with pytest.raises(UsageError, match=r"a\.lock: it is no JSON"):
            adapter()
    monkeypatch.setenv("ATTN_LOCKED", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="No such file"):
        engine()
    choose(needs, here, locked=False)
