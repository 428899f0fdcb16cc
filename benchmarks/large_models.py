"""Time and memory of tracing and costing models that fit on no machine at hand.

Llama-3-70B (80 layers, sequence 8192, bfloat16) and the same with fewer and more layers, on the
meta device with costs of a hardware profile, each in a process of its own. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

import torch

from benchmarks.process import run
from planner import plan

HARDWARE = "h200-141gb"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 40, 80, 160])
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--row", action="store_true", help="(for its own child processes)")
    args = parser.parse_args(given)
    if args.row:
        print(json.dumps(row(args.layers[0], args.sequence)))
        return
    print("| layers | parameters, 1e9 | operations | seconds | process, GB | plain peak, GB |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for layers in args.layers:
        command = ["--row", "--layers", str(layers), "--sequence", str(args.sequence)]
        done = run("benchmarks.large_models", command)
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {layers} | {found['parameters'] / 1e9:.1f} | {found['operations']} "
            f"| {found['seconds']:.1f} | {found['process_bytes'] / 1e9:.2f} "
            f"| {found['peak_bytes'] / 1e9:.1f} |",
            flush=True,
        )


def row(layers: int, sequence: int) -> dict[str, float]:
    """One model, from its module to a plan that saves everything."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=sequence,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        tokens = torch.empty(1, sequence, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    start = time.perf_counter()
    made = plan(model, batch, budget_gb=1e6, hardware=HARDWARE)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "operations": len(made.order),
        "seconds": time.perf_counter() - start,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_bytes": made.peak_bytes,
    }


if __name__ == "__main__":
    main()
