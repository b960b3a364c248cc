"""Files of prompts for tests: JSON, JSON lines or CSV, by the suffix."""

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from conewise.text.prompts import BETWEEN, FIELDS, Pair


def write_pairs(path: Path, pairs: Iterable[Pair]) -> Path:
    """Write pairs as `read_pairs` reads them."""
    rows = [{name: asdict(pair)[name] for name in FIELDS} for pair in pairs]
    if path.suffix.lower() == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow({**row, **{name: BETWEEN.join(row[name]) for name in FIELDS[2:]}})
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        text = f"[{', '.join(lines)}]" if path.suffix == ".json" else "\n".join(lines)
        path.write_text(f"{text}\n", encoding="utf-8")
    return path
