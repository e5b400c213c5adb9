import re

import pytest

from megafp8.config.data_blend import Blend, parse_blend


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Blend((), None)),
        (["a"], Blend(("a",), None)),
        (["a", "b"], Blend(("a", "b"), None)),
        (["a", "b", "c"], Blend(("a", "b", "c"), None)),
        (["7"], Blend(("7",), None)),
        (["٧"], Blend(("٧",), None)),
        (["1", "a"], Blend(("a",), (1.0,))),
        (["0.3", "a", "7e-1", "b"], Blend(("a", "b"), (0.3, 0.7))),
        (["30", "a", "70", "a"], Blend(("a", "a"), (30.0, 70.0))),
    ],
)
def test_blend(words, expected):
    assert parse_blend(words) == expected


@pytest.mark.parametrize(
    "words", [["0.3", "a", "b", "0.7"], ["a", "2"], ["0.3", "a", "b"], ["1", "2"], ["0.5", "a", "b", "c"]]
)
def test_weights_and_prefixes_alternate(words):
    with pytest.raises(ValueError, match="must alternate"):
        parse_blend(words)


@pytest.mark.parametrize(("weight", "other"), [("0", "1"), ("-1", "1"), ("nan", "1"), ("inf", "1"), ("-inf", "0.5")])
def test_weights_are_above_zero(weight, other):
    with pytest.raises(ValueError, match=f"above 0, and {weight} is not"):
        parse_blend([other, "a", weight, "b"])


@pytest.mark.parametrize("weight", ["٠.٣", "３", "0.٣", "\u00a00.3", "-٣"])
def test_weights_are_in_ascii(weight):
    for words in (["0.7", "a", weight, "b"], [weight, "a", weight, "b"]):
        with pytest.raises(ValueError, match=re.escape(f"digits 0 to 9, and {weight!r} is not")):
            parse_blend(words)


@pytest.mark.parametrize("words", [["1e308", "a", "1e308", "b"], ["1e308", "a", "1e-308", "b"]])
def test_each_weight_is_a_share_of_their_sum(words):
    """It would be 0, and no sample would be drawn from the shard."""
    with pytest.raises(
        ValueError, match=r"the smallest weight, 1e.308, rounds to 0 relative to the sum, (inf|1e\+308)"
    ):
        parse_blend(words)
