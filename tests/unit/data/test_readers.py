import gzip
import json

import pytest

from megafp8.data.readers import expand_inputs, parse_texts, read_batches
from megafp8.errors import DataError


def texts_of(path, keys=("text",), batch_bytes=1 << 20):
    return [text for batch in read_batches(path, batch_bytes=batch_bytes) for text in parse_texts(batch, keys)]


def write_lines(path, lines):
    content = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
@pytest.mark.parametrize("batch_bytes", [1, 64, 1 << 20])
def test_jsonl_gives_its_texts_in_order(tmp_path, name, batch_bytes):
    expected = [f"text {n} \u00e9\n" for n in range(50)]
    lines = [json.dumps({"text": text, "id": n}) for n, text in enumerate(expected)]
    lines.insert(7, "")
    path = write_lines(tmp_path / name, lines)
    assert texts_of(path, batch_bytes=batch_bytes) == [(text,) for text in expected]


def test_progress_adds_up_to_the_file(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz", "b.txt"):
        path = write_lines(tmp_path / name, [json.dumps({"text": "x" * 100})] * 500)
        assert sum(batch.input_bytes for batch in read_batches(path, batch_bytes=1000)) == path.stat().st_size


def test_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo")
    assert texts_of(tmp_path / "a.txt") == [("one\n\ntwo",)]


def test_several_keys(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ['{"text": "t", "title": "u", "n": 3}'])
    assert texts_of(path, ("title", "text")) == [("u", "t")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "line 3 is not JSON"),
        (b'{"text": "\xff"}', "line 3 is not UTF-8"),
        (b'{"body": "x"}', "'text' is missing.*'body'"),
        (b'{"text": 5}', "'text' is a int"),
        (b'["text"]', "a JSON list"),
    ],
)
def test_bad_document_is_named_with_its_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        texts_of(path, batch_bytes=1)
    assert "a.jsonl" in str(caught.value)


@pytest.mark.parametrize("batch_bytes", [1, 100, 1 << 20])
def test_line_numbers_count_over_batches(tmp_path, batch_bytes):
    path = write_lines(tmp_path / "a.jsonl", ['{"text": "fine"}'] * 40 + ["bad"] + ['{"text": "fine"}'] * 9)
    with pytest.raises(DataError, match="line 41 "):
        texts_of(path, batch_bytes=batch_bytes)


@pytest.mark.parametrize("keep_fraction", [0.5, 0.99])
def test_cut_gzip_is_an_error(tmp_path, keep_fraction):
    path = write_lines(tmp_path / "a.jsonl.gz", [json.dumps({"text": str(n) * 50}) for n in range(2000)])
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep_fraction)])
    with pytest.raises(DataError, match="damaged after line"):
        texts_of(path, batch_bytes=100)


def test_inputs_are_expanded_and_all_problems_told(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt", "d.bin"):
        (tmp_path / name).write_text("x")
    found = expand_inputs([str(tmp_path / "c.txt"), str(tmp_path / "*.jsonl")])
    assert [path.name for path in found] == ["c.txt", "a.jsonl", "b.jsonl"]
    with pytest.raises(DataError) as caught:
        expand_inputs([str(tmp_path / "none.jsonl"), str(tmp_path / "d.bin"), str(tmp_path / "*.gz")])
    assert str(caught.value).count("--input") == 3
