"""Progress of preprocessing: a bar on a terminal, lines where the output goes to a file."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Optional, TextIO

if TYPE_CHECKING:
    from megafp8.data.preprocessing.preprocess import PreprocessProgress

LINE_INTERVAL_S = 10.0


class ProgressDisplay:
    """Shows documents, tokens and bytes a second, and the remaining time. Work of an earlier run does not count.

    Args:
        log_interval: documents between two lines; None: a line every 10 seconds. Without effect on a terminal.
        stream: output; None: standard error.

    Attributes:
        last: the last progress shown.
    """

    def __init__(self, log_interval: Optional[int] = None, stream: Optional[TextIO] = None):
        self._log_interval, self._stream = log_interval, stream or sys.stderr
        self._first: Optional[PreprocessProgress] = None
        self.last: Optional[PreprocessProgress] = None
        self._start = self._shown_at = time.monotonic()
        self._shown_documents = 0
        self._bar: Any = None

    def __call__(self, progress: PreprocessProgress) -> None:
        """Show a progress. The first one is the start of the run."""
        self.last = progress
        if self._first is None:
            self._first, self._start = progress, time.monotonic()
            self._shown_at, self._shown_documents = self._start, progress.num_documents
            if progress.num_documents:
                self._stream.write(f"going on after {progress.num_documents:,} documents of an earlier run\n")
        if self._stream.isatty():
            self._show_bar(progress)
        elif self._is_due(progress):
            self._shown_at, self._shown_documents = time.monotonic(), progress.num_documents
            self._stream.write(self.describe(progress) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Close the bar; what it shows stays."""
        if self._bar is not None:
            self._bar.close()

    def describe(self, progress: PreprocessProgress) -> str:
        """Return a line with the finished fraction, speeds and remaining time."""
        share = progress.input_bytes / max(progress.total_bytes, 1)
        left_s = self._seconds() * (progress.total_bytes - progress.input_bytes) / max(self._bytes(progress), 1)
        minutes, seconds = divmod(round(left_s), 60)
        hours, minutes = divmod(minutes, 60)
        return (
            f"{share:6.1%} of {progress.total_bytes / 1e6:,.1f} MB, {progress.num_documents:,} documents, "
            f"{self.speeds(progress, self._seconds())}, {hours}:{minutes:02}:{seconds:02} left"
        )

    def speeds(self, progress: PreprocessProgress, seconds: float) -> str:
        """Return documents, tokens and bytes a second in the `seconds` of this run."""
        assert self._first is not None
        documents = (progress.num_documents - self._first.num_documents) / seconds
        tokens = (progress.num_tokens - self._first.num_tokens) / seconds
        skipped = f", {progress.num_skipped:,} records skipped" if progress.num_skipped else ""
        return (
            f"{documents:,.0f} documents/s, {tokens:,.0f} tokens/s, {self._bytes(progress) / seconds / 1e6:,.1f} MB/s"
            f" of input{skipped}"
        )

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def _bytes(self, progress: PreprocessProgress) -> int:
        assert self._first is not None
        return progress.input_bytes - self._first.input_bytes

    def _is_due(self, progress: PreprocessProgress) -> bool:
        if self._log_interval is not None:
            return progress.num_documents - self._shown_documents >= self._log_interval
        return time.monotonic() - self._shown_at >= LINE_INTERVAL_S

    def _show_bar(self, progress: PreprocessProgress) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=progress.total_bytes, initial=progress.input_bytes, unit="B", unit_scale=True, file=self._stream
            )
        self._bar.set_postfix_str(self.speeds(progress, self._seconds()), refresh=False)
        self._bar.update(progress.input_bytes - self._bar.n)
