"""The subcommands of `megafp8`."""

# Subcommand: the same program as a script of a checkout, and what it does.
SUBCOMMANDS = {
    "pretrain": ("pretrain_gpt.py", "train a GPT, on one device or under torchrun"),
    "generate": ("tools/generate_text.py", "continue a text with a trained model"),
    "checkpoint": ("tools/checkpoint.py", "list, verify, show, prune, hash and seal checkpoints"),
    "convert": ("tools/convert_checkpoint.py", "convert checkpoints to and from Hugging Face's format"),
    "corpus": ("tools/build_stdlib_corpus.py", "write a text corpus from Python's standard library"),
    "train-tokenizer": ("tools/train_tokenizer.py", "train a lossless tokenizer"),
    "preprocess": ("tools/preprocess_data.py", "turn text into token shards"),
    "merge-shards": ("tools/merge_shards.py", "join or divide token shards"),
    "inspect-shards": ("tools/inspect_shards.py", "summarize and verify token shards"),
    "build-index": ("tools/build_index.py", "check shards and build their sample indices"),
    "plan": ("tools/plan.py", "find the fastest layout of a model on a number of GPUs"),
    "plot-schedule": ("tools/plot_lr_schedule.py", "show the learning-rate schedule of a training command"),
    "plot-statistics": ("tools/plot_telemetry.py", "plot the quantization statistics of a run"),
    "inspect-quantization": ("tools/inspect_quantization.py", "measure the quantization error of each recipe"),
    "run-comparison": ("tools/run_comparison.py", "train one model in several recipes and compare them"),
    "report": ("tools/report.py", "report on finished runs or on a scaling study"),
    "compare": ("tools/compare_runs.py", "compare finished runs"),
    "study": ("launcher/scaling_study.py", "run a scaling study or a sweep from a YAML file"),
    "scaling-report": ("tools/scaling_report.py", "fit scaling laws to a study"),
    "torchrun": ("launcher/torchrun.py", "train on the GPUs of this machine, with a log for each rank"),
    "slurm": ("launcher/slurm.py", "submit training to Slurm"),
    "supervise": ("launcher/supervise.py", "restart a training command until its run is done"),
    "check-nodes": ("launcher/check_nodes.py", "check the nodes of a Slurm job before training"),
    "doctor": ("tools/doctor.py", "check whether training can run on this machine"),
}
