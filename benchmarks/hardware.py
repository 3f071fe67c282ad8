"""What a reading of the machine costs, which is done at every logged line: milliseconds for a reading and for a look.

python benchmarks/hardware.py
"""

from __future__ import annotations

import json
import time

from algorist.training.callbacks import Hardware


def main() -> None:
    """Print one JSON object; a reading should stay far below a millisecond of processor time."""
    hardware = Hardware()
    hardware.read()  # looks for children
    began = time.process_time()
    for _ in range(1000):
        hardware.read()
    reading = time.process_time() - began
    began = time.process_time()
    hardware._look()
    print(json.dumps({"reading_ms": reading, "look_ms": 1000 * (time.process_time() - began)}))


if __name__ == "__main__":
    main()
