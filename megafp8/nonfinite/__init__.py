"""Values that are not finite: who finds them, who decides, and what a run does.

detect   Detectors (`detector.py`) add to counts on the device while a step computes, also inside a CUDA graph:
         `gradients.py`, also of FSDP2; `operands.py`, emulated linears; `experts.py`, experts in one launch;
         `te/counters.py`, Transformer Engine's linears. The casts that count are `quantization/counters.py`, the
         Triton kernels and `te/quantizers.py`. `loss_and_flags` checks the loss.
agree    The step sums counts and flags over all ranks in the all-reduce of the loss (`metrics/step_totals.py`), so
         that all ranks decide alike, before the update. Only where the sums say so, `find` asks where, with further
         collectives that every rank calls.
decide   `policy.py`: go on, skip the update, skip it and compute linears in high precision from then on, or stop;
         also for spikes, which `optimizer/skip_update.py` finds.
act      `training/step.py` restores what the step changed. `fall_back` (`policy.py`) changes linears, after which
         `Run` captures its graph again. `training/extensions/rollback.py` returns to a checkpoint.
record   `StepRecord` and events (`training/extensions/step_records.py`); skipped samples and changed linears are
         in checkpoints (`SkipHistory`), so that a resumed run goes on alike.
"""
