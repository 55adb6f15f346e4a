# SPDX-License-Identifier: Apache-2.0
"""Train the byte-level model with any ds_config.json.

    deepspeed --num_gpus 2 scripts/train.py --deepspeed_config ds_config_examples/zero2.json

Nothing here knows of ds_muon: the optimizer is the config's. `--optimizer AdamW` runs the same
config with that one word changed. `--start DIRECTORY --text headers` fine-tunes a checkpoint on
another kind of text, and reports the loss on the first kind too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from byte_lm import CONTEXT, ByteLM, held_out_loss, read_text, training_steps
from tqdm import tqdm

ADAMW_KEYS = ("lr", "weight_decay", "betas", "eps")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--eval_every", type=int, default=40)
    parser.add_argument("--optimizer", help="use this type instead of the config's")
    parser.add_argument("--lr", type=float, help="use this lr instead of the config's")
    parser.add_argument("--params", type=json.loads, default={}, help="more of optimizer.params")
    parser.add_argument("--warmup", type=int, default=20, help="of the schedule's steps")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--text", choices=("stdlib", "headers"), default="stdlib")
    parser.add_argument("--start", help="begin with the weights of this checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/train"))
    parser.add_argument("--no_checkpoint", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def load_config(args: argparse.Namespace) -> dict[str, Any]:
    config = json.loads(Path(args.deepspeed_config).read_text())
    args.deepspeed_config = None
    optimizer = config["optimizer"]
    if args.optimizer:
        optimizer["type"] = args.optimizer
        if "muon" not in args.optimizer.lower():
            params = optimizer["params"]
            optimizer["params"] = {k: params[k] for k in ADAMW_KEYS if k in params}
    optimizer["params"].update(args.params)
    if args.lr is not None:
        optimizer["params"]["lr"] = args.lr
    if args.start:
        steps = {"total_num_steps": args.steps, "warmup_num_steps": args.warmup}
        config["scheduler"]["params"].update(steps)
    return config


def main() -> None:
    args = parse_arguments()
    config = load_config(args)
    train_text, held_out_text = read_text(args.text)
    _, first_text = read_text("stdlib")
    torch.manual_seed(args.seed)
    model = ByteLM(width=args.width, layers=args.layers)
    engine, *_ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), config=config
    )
    if args.start:
        engine.load_checkpoint(args.start, load_module_only=True)
    is_first = engine.global_rank == 0
    log: list[dict[str, float]] = []
    tokens_per_step = engine.train_batch_size() * CONTEXT
    bar = tqdm(total=args.steps, disable=not is_first, unit="step", mininterval=1.0)
    training_s = 0.0
    for step in training_steps(engine, train_text, steps=args.steps, seed=args.seed):
        training_s += step.seconds
        bar.update()
        bar.set_postfix(
            loss=f"{step.loss:.3f}", tok_s=f"{step.number * tokens_per_step / training_s:,.0f}"
        )
        if step.number % args.eval_every == 0 or step.number == args.steps:
            held_out = held_out_loss(engine, held_out_text)
            log.append({"step": step.number, "train": step.loss, "held_out": held_out})
            if args.text != "stdlib":
                log[-1]["held_out_stdlib"] = held_out_loss(engine, first_text)
            if is_first:
                bar.write(f"step {step.number}: train {step.loss:.4f}, held-out {held_out:.4f}")
    bar.close()
    if not args.no_checkpoint:
        engine.save_checkpoint(str(args.out / "checkpoint"))
    if is_first:
        args.out.mkdir(parents=True, exist_ok=True)
        summary = {
            "optimizer": config["optimizer"],
            "steps": args.steps,
            "seed": args.seed,
            "tokens_per_second": args.steps * tokens_per_step / training_s,
            "log": log,
        }
        (args.out / "metrics.json").write_text(json.dumps(summary, indent=1) + "\n")
        kind, lr = config["optimizer"]["type"], config["optimizer"]["params"].get("lr")
        print(
            f"{kind} lr {lr}: held-out loss {log[-1]['held_out']:.4f} nats/byte after {args.steps} "
            f"steps, {summary['tokens_per_second']:,.0f} tokens/s"
            + "".join(f", stdlib {x:.4f}" for x in [log[-1].get("held_out_stdlib")] if x),
            flush=True,
        )


if __name__ == "__main__":
    main()
