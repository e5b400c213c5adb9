import pytest

from megafp8.data.blend import Blend, check_split, parse_blend
from megafp8.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a"], Blend(("a",), None)),
        (["a", "b"], Blend(("a", "b"), None)),
        (["a", "b", "c"], Blend(("a", "b", "c"), None)),
        (["1", "a"], Blend(("a",), (1.0,))),
        (["0.3", "a", "7e-1", "b"], Blend(("a", "b"), (0.3, 0.7))),
        (["a", "2"], Blend(("a", "2"), None)),
    ],
)
def test_blend(values, expected):
    assert parse_blend(values, "--data-path") == expected


@pytest.mark.parametrize("values", [["0.3", "a", "b", "0.7"], ["0", "a", "1", "b"], ["-1", "a"], ["nan", "a"]])
def test_bad_weights_are_refused(values):
    with pytest.raises(ConfigError, match="--train-data-path .*weight"):
        parse_blend(values, "--train-data-path")


@pytest.mark.parametrize("split", ["969,30,1", "1", "99,1", "0.9,0.1,0", "100,0,0", "'99,1,0'"])
def test_split(split):
    check_split(split)


@pytest.mark.parametrize("split", ["", "a", "1,2,3,4", "1;2", "0,0,0", "-1,2", "1,,2", "90 10", "1e-3,1,0"])
def test_bad_split_is_refused(split):
    with pytest.raises(ConfigError, match="--split"):
        check_split(split)
