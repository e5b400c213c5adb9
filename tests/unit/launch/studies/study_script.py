"""Stand-in for pretrain_gpt.py: ends as a file beside the run's folder says, and records when and where it ran.

`ends.json` has a list of ends for each learning rate, as `fake_run.py` reads them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fake_run

if __name__ == "__main__":
    words = sys.argv[1:]
    folder, lr = Path(words[words.index("--save") + 1]), words[words.index("--lr") + 1]
    begun = time.monotonic()
    ends = json.loads((folder.parent / "ends.json").read_text())[lr]
    status = fake_run.main(folder, ends)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    time.sleep(0.3)
    line = json.dumps({"lr": lr, "from": begun, "to": time.monotonic(), "gpus": gpus})
    with open(folder.parent / "log.jsonl", "a") as stream:
        stream.write(line + "\n")
    sys.exit(status)
