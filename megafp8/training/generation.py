"""Text generation from a checkpoint on one device, token by token, with temperature, top-k and top-p sampling.

The model has the layers that it was trained with, FP8 included, without optimizer and gradient buffers. Each token
takes a forward pass over the whole text so far. There is no KV cache: with per-tensor scaling it would change the
arithmetic, since a scale would be computed from one token instead of the sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_weights
from megafp8.checkpoint.manifest import check_complete
from megafp8.checkpoint.metadata import embedding_rows, read_config
from megafp8.config import derived, precision_map
from megafp8.config.precision_options import is_quantized_at
from megafp8.config.schema import DataConfig, RunConfig
from megafp8.config.settings import with_values
from megafp8.data.tokenizers.build import Tokenizer, build_tokenizer
from megafp8.device import capability
from megafp8.device.platform import Platform, detect_platform, init_distributed, set_num_threads
from megafp8.errors import CapabilityError, CheckpointError, DataError, NumericsError
from megafp8.mcore.config import build_transformer_config
from megafp8.mcore.process_groups import build_process_groups
from megafp8.models.builder import build_model
from megafp8.models.emulated_layers import cached_weight_codes

INCOMPLETE_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class LanguageModel:
    """A trained model that predicts the next token.

    Attributes:
        path: of the checkpoint.
        config: of the model on this device.
        implementation: the layers in use: `transformer_engine`, `emulated` or `local`.
        context_tokens: length of the context window.
        length_multiple: sequence lengths must be a multiple of it, for the GEMMs.
    """

    path: Path
    config: RunConfig
    implementation: str
    tokenizer: Tokenizer
    module: torch.nn.Module
    device: torch.device
    context_tokens: int
    length_multiple: int

    def __str__(self) -> str:
        precision, dtype = self.config.precision, derived.params_dtype(self.config.precision)
        recipe = derived.quantization_recipe(precision)
        kind = f"FP4 {precision.fp4_format}" if precision.fp8_format is None else f"FP8 {precision.fp8_format}"
        quantized = "" if recipe is None else f", {kind} {recipe}"
        quantized += f", {' '.join(precision.precision_map)}" if precision.precision_map else ""
        return f"{self.path}: {self.implementation} layers, {dtype}{quantized}, on {self.device}"

    @torch.no_grad()
    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits of the token after `ids`. Shape: (tokenizer's vocabulary,), FP32, on the CPU."""
        window = list(ids[-self.context_tokens :])
        last = len(window) - 1
        # Attention is causal: padding after the last token affects its logits only through per-tensor scales.
        window += window[-1:] * (-len(window) % self.length_multiple)
        tokens = torch.tensor([window], device=self.device)
        positions = torch.arange(len(window), device=self.device)[None]
        logits = self.module(tokens, positions, None)
        return logits[0, last, : self.tokenizer.vocab_size].float().cpu()


@dataclass(frozen=True)
class Sample:
    """A generated continuation of a prompt.

    Attributes:
        text: without the prompt.
        num_tokens: generated tokens, without the end of the document.
        ended_by: `eod` for the end of the document, `length` for the requested number of tokens.
    """

    prompt: str
    text: str
    num_prompt_tokens: int
    num_tokens: int
    ended_by: str
    seed: int


def load_language_model(
    folder: Path,
    step: Optional[int] = None,
    high_precision: bool = False,
    tokenizer_files: Optional[Mapping[str, str]] = None,
) -> LanguageModel:
    """Build the model of a checkpoint, of any parallel layout, on this process's device.

    Args:
        folder: the run's `--save`.
        step: of the checkpoint; default the newest.
        high_precision: do not quantize. Checkpoints of a high-precision step of `--fp8-schedule` never are.
        tokenizer_files: fields of the data section (`tokenizer_type`, `tokenizer_model`...) in place of the saved ones.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        DataError: the tokenizer's files are missing, or of another tokenizer.
        CapabilityError: this device does not support the precision.
    """
    found = find_checkpoint(folder, step)
    if found is None:
        raise CheckpointError(f"--load {folder} holds no checkpoint; give the folder that a run had as --save")
    path = found[1]
    check_complete(path)
    saved = read_config(path)
    high_precision = high_precision or not is_quantized_at(saved.precision, max(1, found[0]))
    config, implementation = single_device_config(saved, capability.detect_target(), high_precision)
    config = with_values(config, {f"data.{name}": value for name, value in (tokenizer_files or {}).items()})
    tokenizer = load_tokenizer(config.data, saved.model.vocab_size)
    vocab_size = embedding_rows(path)
    check_vocabulary(path, saved, tokenizer, vocab_size)

    platform = detect_platform()
    module = build_module(config, implementation, vocab_size, platform)
    load_weights(path, [module])
    multiple = derived.gemm_alignment(config.precision) if implementation == "transformer_engine" else 1
    assert config.data.seq_length is not None
    return LanguageModel(
        path=path,
        config=config,
        implementation=implementation,
        tokenizer=tokenizer,
        module=module,
        device=platform.device,
        context_tokens=config.data.seq_length // multiple * multiple,
        length_multiple=multiple,
    )


def single_device_config(saved: RunConfig, target: capability.Target, high_precision: bool) -> tuple[RunConfig, str]:
    """The configuration for forward passes of a saved model on one device, and the layers in use.

    The layers are those of the run if the device supports them, else others of the same precision.

    Raises:
        CapabilityError: no layers support the precision on this device.
    """
    precision = dataclasses.replace(
        saved.precision,
        fp8_format=None if high_precision else saved.precision.fp8_format,
        fp4_format=None if high_precision else saved.precision.fp4_format,
        fp8_dot_product_attention=False,  # supported by few devices, and its state is for training
        # The rest is for training only, or selects other kernels for the same arithmetic.
        attention_backend="auto",
        fp8_param_gather=False,
        precision_map=() if high_precision else saved.precision.precision_map,
        fp8_schedule=None,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        split_rope_fusion=False,
        residual_norm_fusion=False,
        swiglu_quantize_fusion=False,
        quantize_kernels=None,
        use_transformer_engine_op_fuser=False,
    )
    overrides = tuple(entry for entry in saved.overrides if entry.startswith("transformer."))
    problems: list[str] = []
    for layers in (precision.transformer_impl, "auto", "emulated"):
        chosen = dataclasses.replace(precision, transformer_impl=layers)
        config = RunConfig(model=saved.model, precision=chosen, data=saved.data, overrides=overrides)
        implementation = capability.resolve_implementation(config, target)
        if implementation == "transformer_engine":
            config = with_values(config, {"precision.quantize_kernels": "te"})
        found = capability.capability_problems(config, target)
        if not found:
            return config, implementation
        problems = problems or found
    is_quantized = precision_map.is_quantized(precision)
    fix = ["--precision high generates without quantization"] if is_quantized else []
    raise CapabilityError(problems + fix)


def load_tokenizer(data: DataConfig, vocab_size: Optional[int]) -> Tokenizer:
    """The tokenizer of the run, whose files may have moved."""
    try:
        return build_tokenizer(data, vocab_size)
    except DataError as error:
        flags = "--vocab-file and --merge-file" if data.vocab_file else "--tokenizer-model"
        raise DataError(f"{error} The run was trained with it; {flags} says where it is now.") from error


def check_vocabulary(path: Path, saved: RunConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check the size of the tokenizer's vocabulary against the embedding.

    Raises:
        DataError: the padded vocabulary size is not that of the embedding.
    """
    is_other = saved.model.vocab_size is None and derived.padded_vocab_size(saved, tokenizer.vocab_size) != vocab_size
    if is_other or tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the embedding in {path} {vocab_size} rows: it was "
            "made for another tokenizer; --tokenizer-model names the right one"
        )


def build_module(config: RunConfig, implementation: str, vocab_size: int, platform: Platform) -> torch.nn.Module:
    """The complete model on this device, in eval mode. Initializes process groups of one rank."""
    set_num_threads(config.training.num_threads, derived.useful_threads(config))
    init_distributed(platform, config.parallel)
    build_process_groups(config)
    transformer_config = build_transformer_config(config, implementation, platform.kind == "cuda")
    (module,) = build_model(config, transformer_config, implementation, vocab_size)
    return module.eval()


def encode_prompt(model: LanguageModel, prompt: str) -> list[int]:
    """The token ids of a prompt; for an empty one the end-of-document token.

    Raises:
        DataError: ids outside of the vocabulary.
    """
    ids = model.tokenizer.tokenize(prompt) or [model.tokenizer.eod]
    strange = [token for token in ids if not 0 <= token < model.tokenizer.vocab_size]
    if strange:
        raise DataError(f"the prompt has token {strange[0]}; the model has 0 to {model.tokenizer.vocab_size - 1}")
    return ids


def generate_ids(
    model: LanguageModel, prompt_ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int
) -> Iterator[int]:
    """Yield new tokens up to the end of the document, which is not yielded, or to the maximum number.

    Equal logits and seeds give equal tokens on every device, because sampling is done on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    with cached_weight_codes([model.module]):
        for _ in range(max_new_tokens):
            token = next_token(model.next_logits(ids), sampling, generator)
            if token == model.tokenizer.eod:
                return
            ids.append(token)
            yield token


class TextStream:
    """Incremental decoding of tokens into complete characters, whose bytes may be spread over several tokens.

    All tokens are decoded each time, since the text of a token may depend on those before.

    Attributes:
        text: the text returned so far.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.ids = list(prompt_ids)
        self.text = ""
        self.prompt_length = len(tokenizer.detokenize(self.ids))

    def add(self, token: int) -> str:
        """Add a token, and return the characters that it completes, if any."""
        self.ids.append(token)
        return self.advance(self.decoded().rstrip(INCOMPLETE_CHARACTER))

    def finish(self) -> str:
        """Return the rest, with bytes that form no character."""
        return self.advance(self.decoded())

    def decoded(self) -> str:
        """The text of all new tokens."""
        return self.tokenizer.detokenize(self.ids)[self.prompt_length :]

    def advance(self, decoded: str) -> str:
        """The part of the decoded text that was not returned before."""
        piece = decoded[len(self.text) :]
        self.text += piece
        return piece


def generate_text(
    model: LanguageModel,
    prompt: str,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    show: Callable[[str], None],
) -> Sample:
    """Continue a prompt, and show the new text in pieces as it is generated.

    Raises:
        DataError: the prompt has ids outside of the vocabulary.
        NumericsError: the model's logits are not finite.
    """
    prompt_ids = encode_prompt(model, prompt)
    stream = TextStream(model.tokenizer, prompt_ids)
    for token in generate_ids(model, prompt_ids, sampling, max_new_tokens, seed):
        show(stream.add(token))
    show(stream.finish())
    num_tokens = len(stream.ids) - len(prompt_ids)
    return Sample(
        prompt=prompt,
        text=stream.text,
        num_prompt_tokens=len(prompt_ids),
        num_tokens=num_tokens,
        ended_by="length" if num_tokens == max_new_tokens else "eod",
        seed=seed,
    )


@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token: the top k are selected, temperature is applied, then the top p are selected.

    Attributes:
        temperature: divides the logits; above 0.
        top_k: number of most probable tokens to sample from; 0 for all, 1 for greedy decoding.
        top_p: sample from the fewest most probable tokens with at least this total probability, in (0, 1].
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def problems(self) -> list[str]:
        """Problems of the values, in words."""
        found = []
        if not 0 < self.temperature < float("inf"):
            found.append(f"--temperature {self.temperature:g}: must be above 0; for the most probable token: --greedy")
        if self.top_k < 0:
            found.append(f"--top-k {self.top_k}: must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            found.append(f"--top-p {self.top_p:g}: must be above 0 and at most 1 (off)")
        return found


GREEDY = Sampling(top_k=1)


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The ids to sample from, the most probable first and of equal ones the lowest, and their probabilities.

    Shapes: logits (vocabulary,); both results (C,), 1 <= C <= vocabulary.
    Numerics: FP32; the probabilities add up to 1.
    Source: top-p is nucleus sampling (Holtzman et al., arXiv:1904.09751).
    """
    ranked, ids = torch.sort(logits.float(), descending=True, stable=True)
    if sampling.top_k > 0:
        ranked, ids = ranked[: sampling.top_k], ids[: sampling.top_k]
    probabilities = torch.softmax(ranked / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        kept = int((before < sampling.top_p).sum())
        ids, probabilities = ids[:kept], probabilities[:kept] / probabilities[:kept].sum()
    return ids, probabilities


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample one token. Both arguments are on the same device; a single candidate draws no random number.

    Raises:
        NumericsError: the logits are not finite.
    """
    if not torch.isfinite(logits).all():
        raise NumericsError("the model's logits are not finite: its weights have diverged, or its precision overflows")
    ids, probabilities = candidates(logits, sampling)
    if len(ids) == 1:
        return int(ids[0])
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
