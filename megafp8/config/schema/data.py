"""Settings: tokenizer and token shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megafp8.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokenizer and token shards."""

    data_path: tuple[str, ...] = setting((), "shard prefixes, or weight prefix weight prefix ...", many=True, path=True)
    train_data_path: tuple[str, ...] = setting((), "shards for training only", many=True, path=True)
    valid_data_path: tuple[str, ...] = setting((), "shards for validation only", many=True, path=True)
    test_data_path: tuple[str, ...] = setting((), "shards for testing only", many=True, path=True)
    split: Optional[str] = setting(None, "train,validation,test parts of --data-path; default 969,30,1")
    data_cache_path: Optional[str] = setting(None, "folder for dataset indices; default beside the run", path=True)
    mock_data: bool = setting(False, "made-up tokens instead of --data-path")
    seq_length: Optional[int] = setting(None, "tokens in one sample", flags=("--seq-length", "--encoder-seq-length"))
    tokenizer_type: Optional[str] = setting(
        None, "tokenizer; default GPT2BPETokenizer where --vocab-file and --merge-file are given",
        choices=(
            "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer",
            "GPT2BPETokenizer", "TikTokenizer", "ByteLevelTokenizer", "NullTokenizer",
        ),
    )
    tokenizer_model: Optional[str] = setting(
        None, "file or folder of the tokenizer, or name of a tiktoken encoding", path=True
    )
    vocab_file: Optional[str] = setting(None, "vocabulary file (GPT2BPETokenizer)", path=True)
    merge_file: Optional[str] = setting(None, "merges file (GPT2BPETokenizer)", path=True)
    tiktoken_pattern: Optional[str] = setting(None, "splitting pattern of a file for TikTokenizer: v1 or v2 (default)")
    tiktoken_num_special_tokens: Optional[int] = setting(
        None, "ids before the ranks of a file for TikTokenizer; default 1000"
    )
    allow_other_tokenizer: bool = setting(False, "train on shards that another tokenizer made, by their manifests")
    num_workers: int = setting(2, "loader processes per rank; 0 loads in the training process")
    reset_position_ids: bool = setting(False, "positions restart at each document")
    reset_attention_mask: bool = setting(False, "attention does not cross documents")
    eod_mask_loss: bool = setting(False, "no loss on end-of-document tokens")
    create_attention_mask_in_dataloader: bool = setting(
        True, "the loader makes the attention mask (unused: attention is causal by construction)",
        off=("--no-create-attention-mask-in-dataloader",),
    )
    mmap_bin_files: bool = setting(True, "map shards into memory", off=("--no-mmap-bin-files",))
    dataloader_type: str = setting("single", "order of samples: single = one pass in index order", choices=("single",))
