"""The demo: make a small start model, warm it up on answers, then train it with PPO. `make demo` runs this.

Equal to running the commands it prints by hand.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    began = time.monotonic()
    for what, command in (
        ("a start model in Hugging Face format", ["-m", "moerl.demo_model", "--out", "runs/demo/start"]),
        ("supervised warm-up", ["-m", "moerl.cli", "sft", "configs/demo_sft.yaml"]),
        ("PPO", ["-m", "moerl.cli", "train", "configs/demo_ppo.yaml"]),
    ):
        print(f"\n=== {what}: python {' '.join(command)}", flush=True)
        code = subprocess.run([sys.executable, *command]).returncode
        if code:
            return code
    print(f"\ndemo finished in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    if not Path("configs/demo_ppo.yaml").is_file():
        sys.exit("run the demo from the repository root: configs/demo_ppo.yaml is not here")
    sys.exit(main())
