"""Samples of text in training: the most probable continuations of prompts (`--sample-interval`).

They change nothing of the training: passes are those of a validation, which draw no random number of the run's and
leave the state of delayed scaling as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.config.schema import LoggingConfig
from megafp8.config.stages import microbatch_group_size
from megafp8.data.tokenizers.build import Tokenizer, build_tokenizer
from megafp8.errors import DataError, NumericsError
from megafp8.mcore.multi_token import main_output_only
from megafp8.mcore.process_groups import split_over_context
from megafp8.metrics.records import SampleRecord
from megafp8.metrics.timers import SAMPLES
from megafp8.models.layer_runtime import layer_runtime
from megafp8.resilience.watchdog import AFTER_STEP, SAMPLE
from megafp8.training.evaluation import evaluation_mode
from megafp8.training.extension import Extension, LoopState, is_multiple
from megafp8.training.generation import encode_prompt, generate_text, padded_window
from megafp8.training.key_value_cache import KeyValueCache
from megafp8.training.run import Run
from megafp8.training.sampling import GREEDY
from megafp8.training.signals import is_stop_requested
from megafp8.training.step import StepResult
from megafp8.utils.files import UnreadableFile, read_text


class TextSamples(Extension):
    """Records texts that the model generates."""

    def open(self, state: LoopState) -> None:
        """Build the tokenizer, and encode the prompts to report an error in them before the first step."""
        run = state.run
        if run.config.logging.sample_interval:
            self.model = ModelInTraining(run, build_tokenizer(run.config.data, run.config.model.vocab_size))
            self.prompts = read_prompts(run.config.logging)
            for prompt in self.prompts:
                encode_prompt(self.model, prompt)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        run, step = state.run, state.step
        if not is_multiple(step, run.config.logging.sample_interval):
            return
        state.sinks.flush()  # the lines of the steps before it come first
        with run.timer.span(SAMPLES), unchanged_training(run, step):
            for prompt in self.prompts:
                if is_stop_requested(run):
                    break
                run.watchdog.enter(SAMPLE, step)
                state.sinks.write(self.sample(step, prompt))
        run.watchdog.enter(AFTER_STEP, step)

    def sample(self, step: int, prompt: str) -> SampleRecord:
        """Continue a prompt; all ranks call it."""
        pieces: list[str] = []
        max_tokens = self.model.run.config.logging.sample_tokens
        try:
            ended_by = generate_text(self.model, prompt, GREEDY, max_tokens, seed=0, show=pieces.append).ended_by
        except NumericsError:  # on all ranks, which have the same logits; whether training goes on is not decided here
            ended_by = "non-finite"
        return SampleRecord(step=step, prompt=prompt, text="".join(pieces), ended_by=ended_by)


def read_prompts(logging: LoggingConfig) -> tuple[str, ...]:
    """The prompts, each once; the empty one, a new document, if there are none.

    Raises:
        DataError: the file cannot be read.
    """
    lines: list[str] = []
    if logging.sample_prompts is not None:
        try:
            lines = read_text(logging.sample_prompts).splitlines()
        except UnreadableFile as error:
            raise DataError(f"--sample-prompts {logging.sample_prompts} cannot be read: {error.reason}") from error
    prompts = [*logging.sample_prompt, *(line for line in lines if line.strip())]
    return tuple(dict.fromkeys(prompts or [""]))


@contextmanager
def unchanged_training(run: Run, step: int) -> Iterator[None]:
    """A context for forward passes on other data, in the precision of a step."""
    run.set_precision(step)
    with evaluation_mode(run), main_output_only(unwrap_model(run.training_state.chunks)):
        yield


class ModelInTraining:
    """The model of a run as a `TokenPredictor`, in any layout; all ranks call it with the same tokens.

    Every data-parallel replica computes the same passes.

    Attributes:
        num_rows: copies of the text in a pass.
    """

    def __init__(self, run: Run, tokenizer: Tokenizer):
        self.run, self.tokenizer = run, tokenizer
        self.num_rows = run.micro_batch_size if run.config.parallel.tp_comm_overlap else 1
        self.length_multiple = run.length_multiple
        self.context_tokens = run.seq_length // self.length_multiple * self.length_multiple

    def build_cache(self) -> Optional[KeyValueCache]:
        """None: layers in training have none."""

    def cached_weights(self) -> AbstractContextManager[None]:
        """A context in which no weight changes, so that each is quantized once."""
        return layer_runtime(self.run.implementation).cached_weights(self.run.training_state.chunks)

    def next_logits(self, ids: Sequence[int], cache: Optional[KeyValueCache] = None) -> Tensor:
        """Logits of the token after `ids`, the same on all ranks. Shape: (tokenizer's vocabulary,), FP32, on the CPU.

        Each logit is computed by one rank of the first replica, so that a sum over the ranks gathers them exactly.
        """
        run, device = self.run, self.run.platform.device
        window, last = padded_window(ids, self.context_tokens, self.length_multiple)
        batch = {
            "tokens": torch.tensor([window] * self.num_rows, device=device),
            "position_ids": torch.arange(len(window), device=device).repeat(self.num_rows, 1),
        }
        if run.config.parallel.context_parallel_size > 1:
            batch = split_over_context(batch)
        outputs = self.forward(batch, len(window))
        gathered = torch.zeros(run.vocab_size, device=device)
        if outputs and run.rank_position.data_rank == 0:
            shard = outputs[-1][0, batch["position_ids"][0] == last].float()  # [1, V / T], or no row
            first = run.rank_position.tensor_rank * shard.shape[1]
            gathered[first : first + shard.shape[1]] = shard.sum(dim=0)
        dist.all_reduce(gathered)
        return gathered[: self.tokenizer.vocab_size].cpu()

    def forward(self, batch: dict[str, Tensor], length: int) -> list[Tensor]:
        """Run megatron-core's schedule; returns logits (B, S, V) on the last stage, of this rank's part of the
        sequence and of the vocabulary, else none."""
        run, chunks = self.run, self.run.training_state.chunks
        # The interleaved schedule needs a microbatch for each stage.
        num_microbatches = microbatch_group_size(run.config.parallel) if len(chunks) > 1 else 1

        def forward_step(batches: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
            output = model(batch["tokens"], batch["position_ids"], None)
            return output, lambda logits, non_loss_data: logits

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[None] * len(chunks),
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=length,
            micro_batch_size=self.num_rows,
            forward_only=True,
            collect_non_loss_data=True,
        )
