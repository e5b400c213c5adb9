"""What an iteration reads, and how many iterations a run has."""

import pytest

from megafp8.config import iterations
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.errors import ConfigError


def test_batch():
    config = with_values(RunConfig(), {"training.micro_batch_size": 2, "data.seq_length": 8})
    assert iterations.global_batch_size(config, 4) == 8
    assert iterations.num_microbatches(config, 4) == 1
    config = with_values(config, {"training.global_batch_size": 32})
    assert iterations.num_microbatches(config, 4) == 4
    assert iterations.tokens_per_step(config, 4) == 256
    with pytest.raises(ConfigError, match="global batch 32"):
        iterations.num_microbatches(config, 5)


def test_samples_of_the_three_datasets():
    config = with_values(
        RunConfig(), {"training.train_iters": 100, "training.global_batch_size": 4, "training.eval_iters": 5}
    )
    assert iterations.dataset_samples(config, 1) == (400, 20, 20)
    # Every validation reads the same samples.
    config = with_values(config, {"training.eval_interval": 25})
    assert iterations.dataset_samples(config, 1) == (400, 20, 20)
