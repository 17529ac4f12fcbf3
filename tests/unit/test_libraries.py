"""Which library of an any-of group is used, and what is said where none is."""

import pytest
from attn_core.errors import BackendError
from attn_core.plugins.dependencies import chosen_distribution, shortfall, used

GROUP = "First_One>=1 or second or third>=3"


@pytest.mark.parametrize(
    ("libraries", "name", "lacking"),
    [
        ({"first-one": "1", "second": "1"}, "First_One", None),
        ({"first-one": "1.1.dev1"}, "First_One", None),
        ({"first-one": None, "second": None}, "First_One", None),
        ({"first-one": "0.9", "second": "1"}, "second", None),
        ({"second": "1", "third": "4"}, "second", None),
        ({"first-one": "0.9", "third": "2"}, None, "First_One 0.9 and third 2"),
        ({"other": "1"}, None, "First_One or second or third not installed"),
    ],
)
def test_the_first_that_is_installed_as_wanted_is_used(libraries, name, lacking):
    found = used(GROUP, libraries)
    assert (found and found.name) == name
    assert shortfall(GROUP, libraries) == lacking


def test_a_backend_without_its_library_says_what_is_here(monkeypatch):
    assert chosen_distribution("mine", "absent-one or pytest>=1") == "pytest"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5")
    with pytest.raises(BackendError, match=r"mine needs it>=1, here: it 0.5; .*attn doctor"):
        chosen_distribution("mine", "it>=1")
