"""The allocator neither leaks nor frees twice, whatever is asked of it and in whatever order."""

import itertools
import random

import pytest
from attn_core.cache.allocator import PageAllocator
from attn_core.errors import OutOfPagesError, UsageError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

PAGE, PAGES = 4, 12
keys = st.integers(0, 5)
tokens = st.integers(0, 30)


class Allocator(RuleBasedStateMachine):
    """The model: a key holds labels; a label made once is one page for all who share it.

    Beside them a length: the one that was said last, of which only whole pages are shared.
    """

    def __init__(self):
        super().__init__()
        self.real = PageAllocator(PAGES, PAGE)
        self.model, self.lengths = {}, {}
        self.labels = 0
        self.size = PAGES

    def labelled(self):
        return {x for row in self.model.values() for x in row if x is not None}

    @rule(key=keys, length=tokens)
    def grow(self, key, length):
        row = self.model.get(key, [])
        more = max(0, -(-length // PAGE) - len(row))
        have = self.lengths.get(key, 0)
        written = set(row[have // PAGE : -(-length // PAGE)])
        others = set().union(*(r for k, r in self.model.items() if k != key), {None})
        if length > have and written & others:
            before = self.real.num_free, self.real.pages(key)
            with pytest.raises(UsageError, match=f"would write tokens {have} to {length - 1} "):
                self.real.grow(key, length)
            assert (self.real.num_free, self.real.pages(key)) == before
            return
        if more > self.size - 1 - len(self.labelled()):
            before = self.real.num_free
            with pytest.raises(OutOfPagesError):
                self.real.grow(key, length)
            assert self.real.num_free == before
            assert (key in self.real) == (key in self.model)
            return
        fresh = list(range(self.labels, self.labels + more))
        self.labels += more
        self.model[key], self.lengths[key] = row + fresh, length
        pages = self.real.grow(key, length)
        assert self.real.grow(key, length) == pages  # idempotent

    @rule(key=keys, source=keys, length=tokens, behind=st.integers(-3, 40))
    def share(self, key, source, length, behind):
        row = self.model.get(source, [])[: length // PAGE]
        enough = (
            length <= self.lengths.get(source, -1) and None not in row[max(behind, 0) // PAGE :]
        )
        if key in self.model or source not in self.model or not enough:
            with pytest.raises(UsageError):
                self.real.share(key, source, length, behind=behind)
            return
        assert self.real.share(key, source, length, behind=behind) == len(row) * PAGE
        self.model[key], self.lengths[key] = list(row), len(row) * PAGE

    @rule(key=keys, position=st.integers(-3, 40))
    def slide(self, key, position):
        if key not in self.model:
            with pytest.raises(UsageError):
                self.real.release_before(key, position)
            return
        self.real.release_before(key, position)
        row = self.model[key]
        self.model[key] = [None if (i + 1) * PAGE <= position else x for i, x in enumerate(row)]

    @rule(key=keys)
    def release(self, key):
        if key not in self.model:
            with pytest.raises(UsageError):
                self.real.release(key)
            return
        self.real.release(key)
        del self.model[key], self.lengths[key]

    @rule(more=st.integers(-2, 3))
    def extend(self, more):
        if more < 0:
            with pytest.raises(UsageError, match="cannot shrink"):
                self.real.extend(self.size + more)
            return
        self.size += more
        self.real.extend(self.size)

    @precondition(lambda self: self.model)
    @rule()
    def a_callers_list_is_a_copy(self):
        self.real.pages(next(iter(self.model))).clear()

    @invariant()
    def pages_are_labels(self):
        page_of = {}
        for key, row in self.model.items():
            pages = self.real.pages(key)
            assert len(pages) == len(row)
            for label, page in zip(row, pages, strict=True):
                assert (page == 0) == (label is None)
                if label is not None:
                    assert page_of.setdefault(label, page) == page
                    assert 1 <= page < self.size
        assert len(set(page_of.values())) == len(page_of)  # no page twice unless shared
        assert self.real.num_held == len(page_of)
        assert self.real.num_free + self.real.num_held == self.real.total == self.size - 1


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_out_of_pages_names_asked_free_and_total():
    a = PageAllocator(num_pages=4, page_size=16)
    a.grow("one", 20)
    with pytest.raises(OutOfPagesError, match=r"'two' asked for 2 more pages \(17 tokens.* 1 of 3"):
        a.grow("two", 17)
    assert "two" not in a
    a.release("one")
    assert len(a.grow("two", 17)) == 2


def test_errors_name_the_key():
    a = PageAllocator(8, 16)
    with pytest.raises(UsageError, match=r"'x' holds no pages: never grown or shared, or released"):
        a.release("x")
    a.grow("x", 40)
    a.release_before("x", 16)
    with pytest.raises(UsageError, match="'x' gave some of them back"):
        a.share("y", "x", 32)
    a.grow("z", 16)
    with pytest.raises(UsageError, match="asked to share 32 tokens, 'z' has 16"):
        a.share("y", "z", 32)
    with pytest.raises(UsageError, match="'x' holds pages already"):
        a.share("x", "z", 16)
    assert a.share("y", "z", 15) == 0
    assert a.pages("y") == []
    with pytest.raises(UsageError, match="page_size 0"):
        PageAllocator(3, 0)


def test_a_page_that_is_still_filled_is_not_shared():
    a = PageAllocator(20, 16)
    a.grow("a", 50)  # the fourth page holds two tokens
    with pytest.raises(UsageError, match="'b' asked to share 64 tokens, 'a' has 50"):
        a.share("b", "a", 64)
    assert a.share("b", "a", 50) == 48
    assert not set(a.pages("b")) & set(a.pages("a")[3:])
    with pytest.raises(UsageError, match="'c' asked to share 49 tokens, 'b' has 48"):
        a.share("c", "b", 49)
    a.grow("a", 64)  # four drafts, of which one is taken
    a.grow("a", 61)
    with pytest.raises(UsageError, match="'a' has 61"):
        a.share("c", "a", 64)
    assert len(a.pages("a")) == 4  # pages stay


@pytest.mark.parametrize("tokens", [-1, -16, 2.5])
def test_lengths_that_are_none_are_refused(tokens):
    a = PageAllocator(20, 16)
    a.grow("a", 64)
    for ask in (lambda: a.share("b", "a", tokens), lambda: a.grow("b", tokens)):
        with pytest.raises(UsageError, match=f"'b' asked for {tokens} tokens"):
            ask()
    assert "b" not in a
    assert a.num_held == 4


def test_a_shared_page_lives_until_its_last_key():
    a = PageAllocator(8, 4)
    prefix = a.grow("a", 9)
    assert a.share("b", "a", 9) == 8
    assert a.grow("b", 12)[:2] == prefix[:2]
    a.release("a")
    assert a.num_held == 3
    assert not set(prefix[:2]) & set(a.grow("c", 16))
    a.release("b")
    a.release("c")
    assert a.num_free == a.total


def test_a_write_into_a_shared_page_is_refused():
    pages = PageAllocator(9, 4)
    pages.grow("a", 12)
    pages.share("b", "a", 12)
    pages.grow("a", 9)  # it goes back to token 9, whose page both hold
    before = pages.pages("a"), pages.num_free
    with pytest.raises(UsageError, match=r"'a' would write tokens 9 to 13 into page 3, .* 2 keys"):
        pages.grow("a", 14)
    assert (pages.pages("a"), pages.num_free) == before
    pages.share("c", "a", 9)  # what the error says to do
    pages.release("a")
    assert pages.grow("c", 14)[:2] == pages.pages("b")[:2]
    assert pages.pages("c")[2] != pages.pages("b")[2]
    pages.release("c")
    pages.grow("b", 9)
    assert pages.grow("b", 14)[2] == 3  # the last that holds a page may write it


ACTIONS = ("grow", "grow", "share", "share", "back", "release")


@pytest.mark.parametrize("seed", range(6))
def test_no_key_overwrites_what_another_holds(seed):
    """A soak: every key finds its own tokens, whoever shares their pages, goes back or grows."""
    rng, size = random.Random(seed), (1, 3, 16)[seed % 3]
    pages = PageAllocator(200, size)
    slots, texts, refused, names = {}, {}, 0, itertools.count()

    def slot(key, i):
        return pages.pages(key)[i // size] * size + i % size

    def grow(key):
        text = texts[key]
        more = [object() for _ in range(rng.randint(0, 3 * size))]
        pages.grow(key, len(text) + len(more))
        for i, x in enumerate(more, len(text)):
            slots[slot(key, i)] = x
        text += more

    def share(key):
        name = next(names)
        texts[name] = texts[key][: pages.share(name, key, rng.randint(0, len(texts[key])))]

    def back(key):
        del texts[key][rng.randint(0, len(texts[key])) :]
        pages.grow(key, len(texts[key]))

    def release(key):
        pages.release(key)
        del texts[key]

    actions = {"grow": grow, "share": share, "back": back, "release": release}
    for _ in range(500):
        if not texts or rng.random() < 0.1:
            texts[name := next(names)] = []
            pages.grow(name, 0)
        key = rng.choice(list(texts))
        try:
            actions[rng.choice(ACTIONS)](key)
        except OutOfPagesError:
            for name in rng.sample(list(texts), len(texts) // 2):
                release(name)
        except UsageError as error:
            refused += 1
            assert f"{key!r} would write tokens {len(texts[key])} to" in str(error)  # noqa: PT017
            others = {p for name in texts if name != key for p in pages.pages(name)}
            assert others & set(pages.pages(key)[len(texts[key]) // size :])
        for name, text in texts.items():
            assert all(slots[slot(name, i)] is x for i, x in enumerate(text))
    assert refused or size == 1  # with single tokens, few keys go back into a shared one
    for name in list(texts):
        release(name)
    assert (pages.num_free, pages.num_held) == (199, 0)


@pytest.mark.parametrize(("position", "shorter"), [(32, 10), (1000, 20)])
def test_a_write_into_a_page_that_was_given_back_is_refused(position, shorter):
    """Its tokens would go to the dummy page, without a word."""
    allocator = PageAllocator(num_pages=10, page_size=16)
    allocator.grow("a", 20 if position == 1000 else 40)
    allocator.release_before("a", position)
    allocator.grow("a", shorter)
    before = allocator.pages("a")
    with pytest.raises(
        UsageError, match=r"'a' would write tokens \d+ to 24 into pages .*gave back"
    ):
        allocator.grow("a", 25)
    assert allocator.pages("a") == before


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (4, 0), (4.5, 16), (4, "16")])
def test_sizes_that_are_none_are_refused(num_pages, page_size):
    with pytest.raises(UsageError, match="expected integers of 1 or more"):
        PageAllocator(num_pages, page_size)


@pytest.mark.parametrize("number", [1.5, "8", None, float("nan")])
def test_what_is_no_integer_is_refused(number):
    alloc = PageAllocator(PAGES, PAGE)
    alloc.grow("a", 9)
    for call in (
        lambda: alloc.extend(number),
        lambda: alloc.release_before("a", number),
        lambda: alloc.share("b", "a", 4, behind=number),
    ):
        with pytest.raises(UsageError, match="expected an integer"):
            call()
    assert (alloc.num_held, "b" in alloc) == (3, False)
