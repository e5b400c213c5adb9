import pytest

from megafp8.config.rules.paths import outputs_can_be_written, shards_are_there, tokenizer_files_are_there
from megafp8.config.schema import DataConfig, LoggingConfig, RunConfig


@pytest.mark.parametrize(
    ("kind", "model", "is_accepted"),
    [
        ("TikTokenizer", "cl100k_base", True),
        ("TikTokenizer", "ranks.json", False),
        ("TikTokenizer", "a/cl100k_base", False),
        ("SentencePieceTokenizer", "cl100k_base", False),
        ("ByteLevelTokenizer", "unused", True),
    ],
)
def test_an_encoding_name_is_not_a_missing_file(kind, model, is_accepted):
    config = RunConfig(data=DataConfig(tokenizer_type=kind, tokenizer_model=model))
    assert (list(tokenizer_files_are_there(config, 1)) == []) == is_accepted


def test_a_preprocessing_prefix_gets_a_hint_at_its_shard(tmp_path):
    (tmp_path / "corpus_text_document.idx").touch()
    (tmp_path / "corpora_text_document.idx").touch()
    (problem,) = shards_are_there(RunConfig(data=DataConfig(data_path=(f"{tmp_path}/corpus",))), 1)
    assert problem.endswith(f"corpus.idx; did you mean {tmp_path}/corpus_text_document?")


def test_logs_go_to_folders_and_not_to_addresses():
    (problem,) = outputs_can_be_written(RunConfig(logging=LoggingConfig(tensorboard_dir="s3://bucket/boards")), 1)
    assert problem.startswith("--tensorboard-dir s3://bucket/boards: only folders in a local or mounted file system")
