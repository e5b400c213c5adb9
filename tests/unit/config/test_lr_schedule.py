"""Lengths of the schedules of learning rate and weight decay."""

from megafp8.config import iterations
from megafp8.config.lr_schedule import ScheduleSamples, schedule_samples, weight_decay_range
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values


def test_schedule_in_steps():
    config = with_values(
        RunConfig(),
        {
            "training.train_iters": 100,
            "training.global_batch_size": 8,
            "optimizer.lr_warmup_iters": 10,
            "optimizer.lr_wsd_decay_iters": 20,
        },
    )
    assert iterations.train_samples(config, 1) == 800
    assert schedule_samples(config, 1) == ScheduleSamples(warmup=80, decay=800, wsd_decay=160, weight_decay=800)
    shorter = with_values(config, {"optimizer.lr_decay_iters": 50, "optimizer.lr_warmup_fraction": 0.1})
    assert schedule_samples(shorter, 1) == ScheduleSamples(warmup=40, decay=400, wsd_decay=160, weight_decay=800)


def test_schedule_in_samples():
    config = with_values(
        RunConfig(),
        {
            "training.train_samples": 805,
            "training.global_batch_size": 8,
            "optimizer.lr_warmup_samples": 13,
            "optimizer.lr_wsd_decay_samples": 100,
        },
    )
    assert iterations.train_iters(config, 1) == 100
    assert iterations.train_samples(config, 1) == 805
    assert schedule_samples(config, 1) == ScheduleSamples(warmup=13, decay=805, wsd_decay=100, weight_decay=805)


def test_weight_decay_range():
    fixed = with_values(RunConfig(), {"optimizer.weight_decay": 0.1})
    assert weight_decay_range(fixed.optimizer) == (0.1, 0.1)
    changing = with_values(
        RunConfig(),
        {
            "optimizer.weight_decay_incr_style": "linear",
            "optimizer.start_weight_decay": 0.0,
            "optimizer.end_weight_decay": 0.2,
        },
    )
    assert weight_decay_range(changing.optimizer) == (0.0, 0.2)
