"""What 8 and 4 bits cost in perplexity: the model of a run of examples/quickstart.json, on text that it was not trained on.

    plait train examples/quickstart.json --set data.validation_fraction=0.03    a minute
    python -m benchmarks.inference.quantised runs/quickstart                    some minutes more

Exit code 1 where int8 changes the perplexity by more than 0.5 %, or int4 by more than 3 %.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch.nn.functional as F

from benchmarks.common.machine import facts
from plait.cli.planning.calibrations import default_cache
from plait.config.resolving.resolve import Resolved
from plait.data.loader import validation_batches
from plait.data.packing import Sequences
from plait.data.prepare import prepare
from plait.inference.load import load_model
from plait.inference.quantised import quantised_copy, sizes_of
from plait.inference.source import open_source
from plait.sharded.model import ShardedModel

RESULT = Path(__file__).parents[2] / "benchmarks/results/quantised.json"
SEQUENCES, TOGETHER = 1200, 16
MOST = {"int8": 0.005, "int4": 0.03}
"""Change of perplexity."""


def perplexity(sharded: ShardedModel, sequences: Sequences) -> tuple[float, int]:
    """(perplexity, targets)."""
    loss, count = 0.0, 0
    with sharded.evaluating():
        for batch in validation_batches(sequences, limit=SEQUENCES, micro=TOGETHER, dp_rank=0, dp_size=1):
            logits = sharded.predict({"input_ids": batch["input_ids"]}).logits[:, :-1]
            targets = batch["labels"][:, 1:]
            loss += float(F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), ignore_index=-100, reduction="sum"))
            count += int((targets != -100).sum())
    return math.exp(loss / count), count


def main() -> None:
    source = open_source(Path(sys.argv[1]))
    config = Resolved.model_validate_json((Path(sys.argv[1]) / "config.json").read_text(encoding="utf-8"))
    assert config.data is not None
    data = prepare(config.data, cache=default_cache(), own_tokenizer=None, say=print)
    found, targets = {}, 0
    for form in (None, "int8", "int4"):
        sharded = load_model(source, quant=form)
        found[form or "float32"], targets = perplexity(sharded, data.validation)
        sharded.close()
    rows = {}
    for form, most in MOST.items():
        change = found[form] / found["float32"] - 1
        sizes = sizes_of(source.model(), quantised_copy(source.model(), form))
        rows[form] = {
            "perplexity": found[form],
            "change": change,
            "may_change": most,
            "of_the_layers_float32_bytes": sizes.layers / sizes.layers_in_float32,
            "of_the_models_float32_bytes": sizes.model / sizes.model_in_float32,
        }
        print(f"{form}: perplexity {found[form]:.4f}, {change:+.3%} (may be {most:.1%}); {sizes}")
    print(f"float32: perplexity {found['float32']:.4f}; {targets:,} targets")
    content = {"machine": facts("torch", "transformers"), "targets": targets, "perplexity": found["float32"], "forms": rows}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(any(abs(row["change"]) > row["may_change"] for row in rows.values()))


if __name__ == "__main__":
    main()
