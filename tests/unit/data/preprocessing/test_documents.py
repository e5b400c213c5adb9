"""Records to texts: equal with and without orjson. Each bad record is reported with its number and reason."""

import json
import random

import pytest

from megafp8.data.preprocessing import documents as module
from megafp8.data.preprocessing.documents import parse_json_lines, parse_plain_texts, parse_rows, read_texts
from megafp8.data.preprocessing.sources import find_sources
from megafp8.errors import DataError

BAD_LINES = {
    b'{"text": ': "not JSON",
    b'{"text": "a"} x': "not JSON",
    b"": None,
    b" \t\r": None,
    b"null": "a JSON NoneType",
    b'["text"]': "a JSON list",
    b'"text"': "a JSON str",
    b"5": "a JSON int",
    b'{"body": "x"}': "'text' is missing.*'body'.*--json-keys",
    b'{"text": 5}': "'text' is a int",
    b'{"text": null}': "'text' is a NoneType",
    b'{"text": "\xff"}': "not valid UTF-8: invalid start byte at byte 10",
    b'{"text": "\xed\xa0\x80"}': "not valid UTF-8",
    b'{"text": "\\ud800"}': "an unpaired surrogate",
    b'{"text": "a\nb"}': "not JSON",
    b'{"text": "a\x00"}': "not JSON",
    b'\xef\xbb\xbf{"text": "a"}': "not JSON",
    b"[" * 100_000: "not JSON: nested too deeply",
}
GOOD_LINES = {
    b'{"text": "a"}': "a",
    b' {"text": "\\u00e9\\n\\ud83d\\ude00", "id": 1}\r': "\u00e9\n\U0001f600",
    b'{"text": "first", "text": "last"}': "last",
    b'{"text": "a", "n": NaN, "big": 123456789012345678901234567890}': "a",
    b'{"text": ""}': "",
}


@pytest.fixture(params=["orjson", "json"])
def parser(request, monkeypatch):
    if request.param == "json":
        monkeypatch.setattr(module, "_fast_loads", None)
    else:
        pytest.importorskip("orjson")


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_bad_line_is_reported_and_its_neighbours_are_kept(parser, line, reason):
    found = parse_json_lines([b'{"text": "a"}', line, b'{"text": "b"}'], 7, ("text",))
    assert (found.columns, list(found.numbers), found.num_records) == ([["a", "b"]], [7, 9], 3)
    if reason is None:
        assert found.bad == []
    else:
        ((number, told),) = found.bad
        assert number == 8
        assert len(told) < 500
        with pytest.raises(DataError, match=reason):
            raise DataError(told)


@pytest.mark.parametrize("mixed", [False, True])
def test_good_lines_give_their_texts(parser, mixed):
    lines = list(GOOD_LINES) + [b"x"] * mixed
    found = parse_json_lines(lines, 0, ("text",))
    assert found.columns == [list(GOOD_LINES.values())]
    assert len(found.bad) == mixed


def test_several_keys(parser):
    lines = [json.dumps({"title": f"t{n}", "text": f"x{n}", "id": n}).encode() for n in range(3)]
    found = parse_json_lines([*lines, b'{"text": "no title"}'], 0, ("text", "title"))
    assert found.columns == [["x0", "x1", "x2"], ["t0", "t1", "t2"]]
    assert [number for number, _ in found.bad] == [3]


def test_both_parsers_find_the_same_documents(monkeypatch):
    pytest.importorskip("orjson")
    rng = random.Random(0)
    lines = []
    for _ in range(3000):
        line = bytearray(rng.choice(list(GOOD_LINES)))
        for _ in range(rng.randrange(3)):
            line[rng.randrange(len(line))] = rng.choice(b'"{}:,\\ud8\xff\x00 x1')
        lines.append(bytes(line))

    def parse() -> list[tuple]:
        found = [parse_json_lines([line], 0, ("text",)) for line in lines]
        return [(documents.columns, list(documents.numbers), documents.bad) for documents in found]

    fast = parse()
    monkeypatch.setattr(module, "_fast_loads", None)
    assert fast == parse()
    num_good = sum(len(numbers) for _, numbers, _ in fast)
    assert 1000 < num_good < 2500


def test_plain_texts():
    found = parse_plain_texts([b"one", b" \n", b"\xff\xfe", "zwei \u00fc".encode()], 3, 2)
    assert found.columns == [["one", "zwei \u00fc"]] * 2
    assert list(found.numbers) == [3, 6]
    ((number, reason),) = found.bad
    assert number == 5
    assert "not valid UTF-8" in reason


def test_rows():
    sound = parse_rows([["a", "b"], ["c", "d"]], 5, ("x", "y"))
    assert (sound.columns, list(sound.numbers), sound.bad) == ([["a", "b"], ["c", "d"]], [5, 6], [])
    found = parse_rows([["a", None, b"\xff", "d"]], 0, ("text",))
    assert (found.columns, found.numbers) == ([["a", "d"]], [0, 3])
    assert [(number, "missing" in reason, "UTF-8" in reason) for number, reason in found.bad] == [
        (1, True, False),
        (2, False, True),
    ]


def test_texts_of_files_in_order_and_where_they_fail(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    (tmp_path / "b.txt").write_text("three")
    names = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    assert list(read_texts(find_sources(names), "text")) == ["one", "two", "three"]
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"txt": "two"}\n')
    with pytest.raises(DataError, match="a.jsonl line 3: the value of 'text' is missing"):
        list(read_texts(find_sources(names), "text"))
    (tmp_path / "c.txt.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(DataError, match="c.txt.gz is damaged"):
        list(read_texts(find_sources([str(tmp_path / "c.txt.gz")]), "text"))
