"""Checkpoints as a model of the LM Evaluation Harness (`lm_eval`), without an export.

    python -m megafp8.training.lm_eval_model --model megafp8 --model_args load=RUN --tasks NAME --batch_size 8

The arguments of the model are `load`, `step` and `precision`, as of `megafp8 evaluate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from megafp8.data.task_files import make_row
from megafp8.errors import CapabilityError
from megafp8.mcore import cpu_patches

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise CapabilityError("the LM Evaluation Harness is not installed: pip install lm_eval") from error

Request = tuple[Any, Sequence[int], Sequence[int]]


@register_model("megafp8")
class CheckpointLM(TemplateLM):
    """The model of a checkpoint on this device, with the arithmetic of training.

    It measures likelihoods. For tasks that generate text, export the model (`megafp8 convert to-hf`).

    Args:
        load: folder of the run.
        step: of the checkpoint; default the newest.
        precision: see `generation_config`.
        batch_size: sequences in a forward pass.
        device, max_batch_size: of the harness, for other models; not used.
    """

    def __init__(
        self, load: str, step: Optional[int] = None, precision: str = "checkpoint", batch_size: int | str = 1,
        device: Any = None, max_batch_size: Any = None,
    ):  # fmt: skip
        super().__init__()
        if not str(batch_size).isdecimal():
            raise CapabilityError(f"--batch_size {batch_size}: must be a number of sequences")
        self.batch_size = int(batch_size)
        cpu_patches.install()  # before the first import of megatron-core
        from megafp8.training.language_model import load_language_model

        self.model = load_language_model(Path(load), step, precision, uses_cache=False)

    @property
    def eot_token_id(self) -> int:
        """The end of a document, which precedes texts without a context."""
        return self.model.tokenizer.eod

    def tok_encode(self, string: str, add_special_tokens: Optional[bool] = None, **unused: Any) -> list[int]:
        """The token ids of a text; there are no special tokens to add."""
        return self.model.tokenizer.tokenize(string)

    def _loglikelihood_tokens(self, requests: Sequence[Request], **unused: Any) -> list[tuple[float, bool]]:
        from megafp8.training.task_scores import log_likelihoods

        rows = [
            make_row(context or [self.eot_token_id], scored, self.model.context_tokens)
            for _, context, scored in requests
        ]
        return log_likelihoods(self.model, rows, self.batch_size)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each complete text in nats, in windows that follow one another."""
        windows, ends = list[Request](), list[int]()
        for request in requests:
            ids = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(ids, self.eot_token_id, self.model.context_tokens, context_len=1)
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        found = [value for value, _ in self._loglikelihood_tokens(windows)]
        return [sum(found[first:end]) for first, end in zip([0, *ends], ends, strict=False)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Raises CapabilityError."""
        raise CapabilityError(
            "a task generates text; the model `megafp8` measures likelihoods only: use an exported one"
        )


if __name__ == "__main__":
    cli_evaluate()
