"""The cost of passes between measured points, workloads, and profiles as files."""

from __future__ import annotations

import datetime
import json
import math
import multiprocessing
import random
from dataclasses import replace

import pytest
from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.model import CostModel
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass, forms, row_key
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.plugins.registry import load_plugins
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.device import Device
from attn_core.spec.dual_chunk import DualChunk
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from hypothesis import given
from hypothesis import strategies as st

FORM = Form(q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128, page_size=64)
GRID = [Pass.even("decode", b, n) for b in (1, 16, 64) for n in (1024, 4096, 16384)]


def profile_of(time, sizes=GRID, form=FORM, spread=0.0, plan=None, **more):
    costs = {
        Key("a", "", form, x): Cost(
            time(x), time(x) * (1 - spread), time(x) * (1 + spread), 0.0, plan and plan(x)
        )
        for x in sizes
    }
    return Profile(costs=costs, date="2026-11-20T10:00:00+00:00", **more)


def estimate(profile, size, form=FORM, backend="a", graphs=True):
    return CostModel(profile).estimate(backend, "digest", form, size, graphs=graphs)


def affine(size):
    """A launch of 5 µs, and 1 ns per KV token."""
    return 5.0 + size.kv_tokens / 1000


def test_a_measured_point_is_what_was_measured():
    for size in GRID:
        found = estimate(profile_of(affine, spread=0.1), size)
        assert found.us == pytest.approx(affine(size))
        assert (found.low, found.high) == pytest.approx((found.us * 0.9, found.us * 1.1))
        assert found.measured


@given(st.integers(1, 64), st.integers(1024, 16384), st.integers(7, 10))
def test_an_affine_time_is_found_and_a_power_nearly(requests, length, power):
    """The trend is affine in the work; deviations of near points correct it for a power."""
    size = Pass.even("decode", requests, length)

    def steep(x):
        return x.kv_tokens ** (power / 10)

    for time, off in ((affine, 1e-3), (steep, 0.25)):
        found = estimate(profile_of(time), size)
        assert found.us == pytest.approx(time(size), rel=off)
        assert found.low <= found.us <= found.high


@given(st.integers(1, 64), st.integers(16, 64), st.integers(1, 16))
def test_a_ragged_batch_lies_between_even_ones(requests, mean, skew):
    longest = min(mean * skew, 256) * 64
    tokens = max(requests * mean * 64, longest + requests - 1)
    size = Pass(
        phase="decode", requests=requests, kv_tokens=tokens, longest=longest, queries=requests
    )
    even = [Pass.even("decode", requests, n) for n in (1024, 16384)]
    found = estimate(profile_of(affine), size)
    assert affine(even[0]) * 0.9 <= found.us <= affine(even[1]) * 1.1


def test_what_is_far_from_all_that_was_measured_has_no_estimate():
    profile = profile_of(affine)
    for near in (Pass.even("decode", 1, 512), Pass.even("decode", 65, 32768)):
        assert estimate(profile, near).us == pytest.approx(affine(near), rel=1e-3)
    for far in (Pass.even("decode", 1, 64), Pass.even("decode", 1024, 4096)):
        assert estimate(profile, far) is None
    assert estimate(profile, Pass.even("decode", 1, 1 << 18)) is None
    assert estimate(profile, GRID[0], backend="b") is None
    assert estimate(profile, Pass.even("prefill", 1, 4096, 4096)) is None


def test_many_requests_as_long_as_one_alone_was_are_far():
    """A slow backend is measured in small passes alone: of one long request, and of many short."""
    sizes = [Pass.even("decode", 1, length) for length in (512, 4096, 16384)]
    sizes += [Pass.even("decode", n, 512) for n in (4, 16, 64)]
    profile = profile_of(affine, sizes)
    assert estimate(profile, Pass.even("decode", 8, 16384)) is not None
    assert estimate(profile, Pass.even("decode", 64, 16384)) is None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_backend_of_few_small_passes_is_not_as_fast_in_large_ones(count):
    """Nothing says yet which work takes the time, so launching alone does not."""
    sizes = [Pass.even("decode", 1, length) for length in (1024, 1030, 1040)[:count]]
    profile = profile_of(lambda x: 0.4 * x.kv_tokens, sizes)
    for large in (Pass.even("decode", 8, 1024), Pass.even("decode", 1, 8192)):
        assert 2 * 409.6 < estimate(profile, large).us < 9 * 409.6


def test_times_of_any_size_have_estimates():
    for us in (1e-300, 1e12):
        found = estimate(profile_of(lambda x, us=us: us), Pass.even("decode", 3, 2000))
        assert 0 < found.low <= found.us <= found.high < math.inf


def test_heads_that_were_not_measured_are_part_of_the_work():
    """Measured with 8 and 32 KV heads, a layer of 16 takes what its bytes take."""

    def time(size, heads=8):
        return 5.0 + size.kv_tokens * heads / 8000

    many = replace(FORM, q_heads=128, kv_heads=32)
    profile = profile_of(time).merged(profile_of(lambda x: time(x, 32), form=many))
    asked = replace(FORM, q_heads=64, kv_heads=16)
    for size in (*GRID, Pass.even("decode", 3, 7000)):
        found = estimate(profile, size, form=asked)
        assert found.us == pytest.approx(time(size, 16), rel=0.02)
        assert not found.measured


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        (replace(FORM, page_size=16), True),
        (replace(FORM, q_heads=64), True),
        (Form(), True),  # unknown heads constrain nothing
        (replace(FORM, head_dim=64, v_head_dim=64), True),
        (replace(FORM, store="fp8_e4m3"), False),
        (replace(FORM, window=4096), False),
        (replace(FORM, sinks=True), False),
        (replace(FORM, deterministic=True), False),
        (replace(FORM, kind="mla"), False),
    ],
)
def test_the_nearest_measured_form_stands_for_heads_dims_and_pages_alone(asked, known):
    found = estimate(profile_of(affine), GRID[0], form=asked)
    assert (found is not None) == known
    assert found is None or found.measured == (FORM.distance(FORM) == asked.distance(FORM))


def test_the_nearest_form_goes_first_and_a_farther_one_fills_its_gaps():
    """Pages of 16 double the shortest pass; a farther form alone has the longer ones."""
    near, far = replace(FORM, page_size=16), FORM
    one = profile_of(lambda x: 2 * affine(x), sizes=GRID[:1], form=near)
    profile = one.merged(profile_of(affine, form=far))
    asked = replace(FORM, page_size=8)
    assert estimate(profile, GRID[0], form=asked).us > 1.4 * affine(GRID[0])
    assert estimate(profile, GRID[0], form=far).us == affine(GRID[0])
    assert estimate(profile, GRID[8], form=asked).us == pytest.approx(affine(GRID[8]), rel=0.1)


@given(st.integers(0, 1 << 30), st.integers(1, 30))
def test_points_that_lie_together_share_their_weight(seed, copies):
    """A point measured many times, nearly alike, pulls an estimate no more than once."""
    rng = random.Random(seed)
    lone = Pass.even("decode", 4, 2000)
    many = [Pass.even("decode", 4, 4000 + i) for i in range(copies)]
    slow = {lone: 1.3, **dict.fromkeys(many, 0.9)}
    profile = profile_of(lambda x: affine(x) * slow.get(x, rng.uniform(0.99, 1.01)), [*GRID, *slow])
    for length in (2000, 2100):
        asked = Pass.even("decode", 4, length + 1)
        assert estimate(profile, asked).us > 1.05 * affine(asked)


def test_another_head_dim_stands_where_nothing_nearer_does_and_not_where_a_row_is_bad():
    asked = replace(FORM, head_dim=64, v_head_dim=64)
    profile = profile_of(affine)
    found = estimate(profile, GRID[3], form=asked)
    assert not found.measured
    assert affine(GRID[3]) / 2.5 < found.us < affine(GRID[3])  # of half the bytes
    own = profile.merged(profile_of(lambda x: 7.0, sizes=GRID[:4], form=asked))
    assert estimate(own, GRID[3], form=asked).us == 7.0
    bad = replace(profile, bad={Key("a", "", asked, GRID[0]): "wrong"})
    assert estimate(bad, GRID[3], form=asked) is None
    assert estimate(bad, GRID[3]).us == affine(GRID[3])


def test_a_pass_in_which_a_backend_failed_has_no_estimate_from_others():
    failed = Pass.even("decode", 3, 2048)
    profile = replace(profile_of(affine), bad={Key("a", "", FORM, failed): "it takes no more"})
    assert estimate(profile, failed) is None
    assert estimate(profile, Pass.even("decode", 3, 2049)) is not None


def test_a_row_that_changed_has_no_times_and_prose_is_no_change():
    row = Capabilities(kind="mha", device="any", dtypes={"bf16"}, kv_dtypes={"bf16"}, priority=1)
    assert row_key(row) == row_key(replace(row, priority=2, note="other words"))
    assert row_key(row) != row_key(replace(row, page_sizes={64}))
    key = Key("a", row_key(row), FORM, GRID[0])
    model = CostModel(Profile(costs={key: Cost(1.0, 1.0, 1.0, 0.0)}))
    assert model.estimate("a", row_key(row), FORM, GRID[0], graphs=True)
    assert model.estimate("a", "another", FORM, GRID[0], graphs=True) is None


def test_only_plain_layers_over_a_cache_have_a_form():
    mha = LayerRequirements(num_q_heads=4, num_kv_heads=2, head_dim=64)
    window = replace(mha, sliding_window=128)
    assert len(forms(Requirements(layers=(mha, window)), 16)) == 2
    chunks = DualChunk(chunk_size=64, local_size=16)
    others = (replace(mha, dual_chunk=chunks), replace(mha, encoder=True), replace(mha, cross=True))
    for other in others:
        assert forms(Requirements(layers=(mha, other)), 16) == ()


# workloads


def test_a_workload_counts_what_one_request_takes():
    workload = Workload(prompts={1000: 1}, requests={4: 3, 1: 1}, output=100, cached=0.75)
    assert workload.passes(Phase.PREFILL, None) == ((Pass.even("prefill", 1, 1000, 250), 1.0),)
    steps = dict(workload.passes(Phase.DECODE, None))
    assert steps == {
        Pass.even("decode", 1, 1050): pytest.approx(25.0),
        Pass.even("decode", 4, 1050): pytest.approx(75 / 4),
    }


def test_requests_that_decode_together_have_the_lengths_of_the_workload():
    """Kernels that are equally fast over equal lengths differ over those that engines run."""
    workload = Workload(prompts={100: 3, 1000: 1}, output=20)
    ((four, share),) = workload.batches("decode", 4)
    assert share == 1.0
    assert (four.kv_tokens, four.longest, four.queries) == (3 * 110 + 1010, 1010, 4)
    alone = dict(workload.batches("decode", 1))
    assert alone == {Pass.even("decode", 1, 110): 0.75, Pass.even("decode", 1, 1010): 0.25}
    ((many, _),) = workload.batches("verify", 8, 400, tree=True)
    assert (many.kv_tokens, many.longest) == (6 * 400 + 2 * 1010, 1010)
    assert (many.queries, many.drafts, many.tree) == (3200, 400, True)
    ((two, _),) = workload.batches("decode", 2)  # its quarters: the middles of halves
    assert two == Pass.even("decode", 2, 110)


def test_the_phase_that_verifies_has_verifications():
    speculation = Speculation(topk=4, num_draft_tokens=8, mode="decode")
    steps = Workload(output=100, acceptance=4).passes(Phase.DECODE, speculation)
    assert {size.phase for size, _ in steps} == {"verify"}
    assert all(size.tree and size.drafts == 8 for size, _ in steps)
    both = Workload().passes(Phase.PREFILL, replace(speculation, mode="prefill"))
    assert {size.phase for size, _ in both} == {"prefill", "verify"}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[]", "a workload is a JSON object of prompts"),
        ("{", "no JSON"),
        ('{"prompt": {}}', "did you mean|known: "),
        ('{"prompts": {}}', "numbers above 0"),
        ('{"prompts": {"0": 1}}', "numbers above 0"),
        ('{"prompts": {"-1": 1}}', "a number above 0 as the key"),
        ('{"prompts": {"1": -1}}', "shares of 0 or more"),
        ('{"prompts": {"1": NaN}}', "shares of 0 or more"),
        ('{"prompts": {"1": 0}}', "shares of 0 or more"),
        ('{"requests": 3}', "an object such as"),
        ('{"output": 0}', "above 0"),
        ('{"cached": 1}', "0 to below 1"),
        ('{"acceptance": 0.5}', "1 or more tokens"),
        ('{"acceptance": true}', "1 or more tokens"),
    ],
)
def test_a_workload_says_what_is_wrong(text, fault):
    with pytest.raises(UsageError, match=fault):
        Workload.parse(text)


# profiles as files


def sample():
    profile = profile_of(affine, environment={"device": "x", "torch": "2"})
    tree = Pass.even("verify", 2, 100, 7, tree=True)
    full = replace(FORM, window=128, sinks=True, logit_cap=True, deterministic=True)
    more = {Key("b", "1a2b", full, tree): Cost(1.5, 1.0, 2.0, 3.0)}
    bad = {Key("c", "", FORM, GRID[0]): "wrong: error 1"}
    return replace(profile, costs={**profile.costs, **more}, bad=bad)


def test_a_profile_comes_back_from_its_file(tmp_path):
    path = tmp_path / "new" / "p.json"
    store.write(path, sample())
    assert store.read_profile(path) == sample()
    assert not list(path.parent.glob("p.json?*"))  # no half-written file stays


def test_a_profile_says_its_age_and_what_differs():
    profile, now = sample(), datetime.datetime(2026, 11, 23, 10, tzinfo=datetime.UTC)
    assert profile.age(now) == "3 days old"
    assert replace(profile, date="2026-11-23T09:00:00+00:00").age(now) == "1 hour old"
    assert replace(profile, date="?").age(now) == "of an unknown date"
    assert replace(profile, date="2026-11-23T09:00:00").age(now) == "1 hour old"  # no zone
    assert profile.differences({"device": "x", "torch": "2"}) == []
    assert profile.differences({"device": "x", "torch": None}) == []
    assert profile.differences({"device": "x", "torch": "2.0"}) == []  # the same version
    assert profile.differences({"device": "x", "torch": "2+cu130"}) != []
    assert profile.differences({"torch": "3", "driver": "5"}) == [
        "device was x and is absent",
        "driver was absent and is 5",
        "torch was 2 and is 3",
    ]


def test_the_later_measurement_of_a_shape_counts_and_a_bad_backend_has_no_times():
    first = sample()
    key = Key("a", "", FORM, GRID[0])
    later = Profile(costs={key: Cost(9.0, 9.0, 9.0, 0.0)})
    assert first.merged(later).costs[key].us == 9.0
    assert first.merged(later).environment == first.environment
    worse = first.merged(Profile(bad={key: "wrong"}))
    assert key not in worse.costs
    assert key not in worse.merged(later).bad


def test_a_file_of_another_environment_is_replaced(tmp_path):
    path = tmp_path / "p.json"
    store.write(path, sample())
    other = Profile(environment={"device": "y"}, date="2026-11-23T10:00:00+00:00")
    store.write(path, other)
    assert store.read_profile(path) == other


def test_a_plan_has_a_cost_of_its_own_where_it_was_measured():
    """Between points it is that of the nearest ones; files of before have none."""
    plans = profile_of(affine, plan=lambda x: 20.0 + x.requests)
    assert estimate(plans, GRID[0]).plan_us == 21.0
    assert 20.0 < estimate(plans, Pass.even("decode", 3, 2000)).plan_us < 90.0
    assert Profile.from_json(json.loads(json.dumps(plans.to_json()))) == plans
    without = profile_of(affine)
    assert estimate(without, Pass.even("decode", 3, 2000)).plan_us is None
    (series,) = without.to_json()["series"]
    assert {len(point) for point in series["points"]} == {8}
    series["points"][0].append(-1.0)
    with pytest.raises(UsageError, match="of a plan, of 0 or more"):
        Profile.from_json(without.to_json() | {"series": [series]})


JUNK = (None, True, -1, 0, 1e400, float("nan"), "", "x" * 400, [], {}, [[]], 1 << 60, "\udcff")


def broken(data, rng):
    """Return plain data with one value anywhere replaced, removed or doubled."""
    if isinstance(data, dict) and data and rng.random() < 0.9:
        key = rng.choice(sorted(data))
        if rng.random() < 0.1:
            return {k: v for k, v in data.items() if k != key}
        if rng.random() < 0.1:
            return data | {rng.choice(("", "x", "\udcff")): rng.choice(JUNK)}
        return data | {key: broken(data[key], rng)}
    if isinstance(data, list) and data and rng.random() < 0.9:
        at = rng.randrange(len(data))
        inner = [] if rng.random() < 0.1 else [broken(data[at], rng)]
        return [*data[:at], *inner, *data[at + 1 :]]
    return rng.choice(JUNK)


@given(st.integers(0, 1 << 32))
def test_any_profile_is_taken_or_refused_in_words(seed):
    """What is taken can be estimated from, and comes back from its own text."""
    rng = random.Random(seed)
    data = json.loads(json.dumps(sample().to_json()))
    for _ in range(rng.randint(1, 3)):
        data = broken(data, rng)
    try:
        profile = Profile.from_json(data)
    except UsageError:
        return
    for size in (*GRID, Pass.even("decode", 3, 2000)):
        found = estimate(profile, size)
        assert found is None or 0 < found.low <= found.us <= found.high < math.inf
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"schema": 1e999}', "schema"),
        (b"null", "object"),
    ],
)
def test_a_file_that_is_no_profile_is_named(tmp_path, text, fault):
    path = tmp_path / "p.json"
    path.write_bytes(text)
    with pytest.raises(UsageError, match=rf"p\.json.*{fault}"):
        store.read_profile(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    path.write_bytes(b" " * 2000)
    monkeypatch.setattr(store, "MOST_BYTES", 1000)
    with pytest.raises(UsageError, match="larger than"):
        store.read_profile(path)
    with pytest.raises(UsageError, match="No such file"):
        store.read_profile(tmp_path / "none.json")


def _writer(path, number, rounds):
    for i in range(rounds):
        size = Pass.even("decode", 1 + number, 100 + i)
        store.write(path, Profile(environment={"device": "x"},
                                  costs={Key("a", "", FORM, size): Cost(1.0, 1.0, 1.0, 0.0)},
                                  date="2026-11-23T10:00:00+00:00"))  # fmt: skip


def test_processes_that_write_one_file_lose_nothing_and_readers_see_whole_files(tmp_path):
    path, rounds = tmp_path / "p.json", 12
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=_writer, args=(path, n, rounds)) for n in range(3)]
    for w in writers:
        w.start()
    seen = 0
    while any(w.is_alive() for w in writers):
        if path.exists():
            now = len(store.read_profile(path).costs)
            assert now >= seen
            seen = now
    for w in writers:
        w.join()
        assert w.exitcode == 0
    assert len(store.read_profile(path).costs) == 3 * rounds


def test_the_environment_names_chip_torch_and_libraries():
    found = environment(load_plugins(), Device("cpu", "avx2"))
    assert {"device", "torch", "attn-core", "threads"} <= found.keys()
    assert found["device"].endswith("(avx2)")
    one, other = store.own_path(found), store.own_path(found | {"torch": "9"})
    assert one != other
    assert one.parent == other.parent
