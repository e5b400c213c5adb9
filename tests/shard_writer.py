"""Shards that tests write document by document. The package itself joins them from parts."""

from __future__ import annotations

import io
from types import TracebackType
from typing import Optional

import numpy as np

from megafp8.data.shards import ShardTotals, bin_path, build_document_index, idx_path, publish_shard, write_index
from megafp8.utils.files import HashedStream, sync, temporary_name


class ShardWriter:
    """Writes one shard; use as a context manager. The files get their names in `finish`. Without it nothing is left.

    Memory: 4 bytes per document, 32 while the index is written.

    Args:
        prefix: path without suffix.
        dtype: of the token ids, see `token_dtype`.
    """

    def __init__(self, prefix: str, dtype: np.dtype):
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self._bin_temporary = temporary_name(bin_path(prefix))
        self._idx_temporary = temporary_name(idx_path(prefix))
        self._lengths: list[np.ndarray] = []
        self._stream = open(self._bin_temporary, "wb")  # noqa: SIM115  closed by finish() or __exit__()
        self._tokens = HashedStream(self._stream)

    def __enter__(self) -> "ShardWriter":
        return self

    def add_documents(self, token_bytes: bytes, lengths: np.ndarray) -> None:
        """Append documents.

        Args:
            token_bytes: the ids of all of them, in the shard's dtype.
            lengths: int32 [documents], tokens in each; 0 for a document without tokens.
        """
        assert int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize == len(token_bytes)
        self._tokens.write(token_bytes)
        self._lengths.append(lengths.astype(np.int32, copy=True))

    def finish(self) -> ShardTotals:
        """Write the index and give both files their names."""
        document_lengths = np.concatenate([np.empty(0, np.int32), *self._lengths])
        sync(self._stream)
        self._stream.close()
        with open(self._idx_temporary, "wb") as stream:
            index = HashedStream(stream)
            write_index(index, [build_document_index(document_lengths, self.dtype)])
            sync(stream)
        publish_shard(self.prefix, self._bin_temporary, self._idx_temporary)
        return ShardTotals(
            num_documents=len(document_lengths),
            num_sequences=int(np.count_nonzero(document_lengths)),
            num_tokens=self._tokens.num_bytes // self.dtype.itemsize,
            bin_bytes=self._tokens.num_bytes,
            bin_sha256=self._tokens.sha256,
            idx_bytes=index.num_bytes,
            idx_sha256=index.sha256,
        )

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._stream.close()
        self._bin_temporary.unlink(missing_ok=True)
        self._idx_temporary.unlink(missing_ok=True)


def encode_index(document_lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """Return the bytes of the `.idx` of documents that are one sequence each (none when the length is 0).

    Args:
        document_lengths: int32 [documents], tokens.
        dtype: of the token ids.
    """
    stream = io.BytesIO()
    write_index(stream, [build_document_index(document_lengths, np.dtype(dtype))])
    return stream.getvalue()
