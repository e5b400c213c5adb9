"""The subcommands of `megafp8`."""

COMMANDS = {
    "Train": {
        "pretrain": "train a GPT, on one device or under torchrun",
        "torchrun": "train on the GPUs of this machine, with a log for each rank",
        "slurm": "submit training to Slurm",
        "kubernetes": "write training as a Kubernetes manifest",
        "supervise": "restart a training command until its run is done",
    },
    "Data": {
        "corpus": "write a text corpus from Python's standard library",
        "train-tokenizer": "train a lossless tokenizer",
        "preprocess": "turn text into token shards",
        "merge-shards": "join or divide token shards",
        "inspect-shards": "summarize and verify token shards",
        "build-index": "check shards and build their sample indices",
    },
    "Models": {
        "generate": "continue a text with a trained model",
        "evaluate": "measure the loss of checkpoints on a data set",
        "convert": "convert checkpoints of Hugging Face and Megatron-LM",
        "checkpoint": "list, verify, show, prune, hash and seal checkpoints",
    },
    "Compare": {
        "run-comparison": "train one model in several recipes and compare them",
        "compare": "compare finished runs",
        "report": "report on finished runs or on a scaling study",
        "precision-table": "train one model in FP32, BF16, FP8 and FP4, and tabulate",
        "stability": "test the stability of recipes against BF16, with known-bad controls",
        "coordinate-check": "compare the activations of widths, with and without muP",
        "study": "run a scaling study or a sweep from a YAML file",
        "scaling-report": "fit scaling laws to a study",
        "inspect-quantization": "measure the quantization error of each recipe",
        "plot-statistics": "plot the quantization statistics of a run",
    },
    "Plan and check": {
        "plan": "find the fastest layout of a model on a number of GPUs",
        "goodput": "predict the tokens per day under failures, saves and restarts",
        "plot-schedule": "show the learning-rate schedule of a training command",
        "doctor": "check whether training can run on this machine",
        "verify-device": "compare what this GPU computes with the emulation",
    },
}
"""What each subcommand does, in the groups of `megafp8 --help`."""
INTERNAL = {"check-nodes": "check the nodes of a Slurm job before training"}
"""Started by job scripts; `megafp8 --help` leaves it out."""
SUBCOMMANDS = {name: text for group in (*COMMANDS.values(), INTERNAL) for name, text in group.items()}
