#!/usr/bin/env python3
"""Sends what runs of Troupe measured (metrics.jsonl) to Weights & Biases or to MLflow.

Usage: import_metrics.py wandb RUN [RUN...] [--project NAME]
       import_metrics.py mlflow RUN [RUN...] [--experiment NAME]

RUN is the folder of a run (--save). Each becomes a run of the service, named as the folder, with the
options of options.toml as its configuration. Where to is the service's own setting: WANDB_MODE=offline
writes files below ./wandb for `wandb sync`; MLFLOW_TRACKING_URI names a server or a local store.
Needs Python 3.11 and the package of the service (`pip install wandb` or `pip install mlflow`).
docs/reports.md
"""

import argparse
import json
import sys
import tomllib
from datetime import datetime
from pathlib import Path

# Of the numbers of a layer's experts, those that are one number each.
EXPERT_NUMBERS = ("imbalance", "dead", "dropped", "entropy")


def scalars_of(line):
    """The numbers of a line of metrics.jsonl by name, those of layers as experts/LAYER/NAME."""
    numbers = {name: value for name, value in line.items()
               if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)}
    if "loss" in line:
        numbers["skipped"] = int(line.get("skipped", False))
    for layer in line.get("experts", []):
        for name in EXPERT_NUMBERS:
            if isinstance(layer.get(name), (int, float)):
                numbers[f"experts/{layer['layer']}/{name}"] = layer[name]
    return numbers


def read_run(folder):
    """The options, and for each step that has any its numbers and the time in ms. Lines that are cut
    or no metrics are counted on standard error."""
    options_file = folder / "options.toml"
    options = tomllib.loads(options_file.read_text()) if options_file.exists() else {}
    steps, times, left_out = {}, {}, 0
    with open(folder / "metrics.jsonl", encoding="utf-8", errors="replace") as lines:
        for text in lines:
            try:
                line = json.loads(text)
                step = int(line["step"])
                if line.get("header"):
                    continue
                times[step] = int(datetime.fromisoformat(line["time"]).timestamp() * 1000)
                steps.setdefault(step, {}).update(scalars_of(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                left_out += 1
    if left_out:
        print(f"{folder}: {left_out} lines of metrics.jsonl cannot be read; they are left out.",
              file=sys.stderr)
    return options, [(step, times[step], steps[step]) for step in sorted(steps)]


def send_to_wandb(folder, arguments):
    import wandb
    options, steps = read_run(folder)
    with wandb.init(project=arguments.project, name=folder.name, config=options) as run:
        for step, time_ms, numbers in steps:
            run.log(numbers | {"time": time_ms / 1000}, step=step)


def send_to_mlflow(folder, arguments):
    import mlflow
    from mlflow.entities import Metric, Param
    options, steps = read_run(folder)
    mlflow.set_experiment(arguments.experiment)
    with mlflow.start_run(run_name=folder.name) as run:
        client = mlflow.MlflowClient()
        params = [Param(name, str(value)) for name, value in options.items()]
        metrics = [Metric(name, float(value), time_ms, step)
                   for step, time_ms, numbers in steps for name, value in numbers.items()]
        # What one request may hold.
        for begin in range(0, len(params), 100):
            client.log_batch(run.info.run_id, params=params[begin:begin + 100])
        for begin in range(0, len(metrics), 1000):
            client.log_batch(run.info.run_id, metrics=metrics[begin:begin + 1000])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("service", choices=["wandb", "mlflow"])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--project", default="troupe", help="of wandb (default: troupe)")
    parser.add_argument("--experiment", default="troupe", help="of mlflow (default: troupe)")
    arguments = parser.parse_args()
    for folder in arguments.runs:
        if not (folder / "metrics.jsonl").is_file():
            parser.error(f"{folder} has no metrics.jsonl: give the folder of a run (--save)")
    send = send_to_wandb if arguments.service == "wandb" else send_to_mlflow
    try:
        for folder in arguments.runs:
            send(folder.resolve(), arguments)
    except ImportError as error:
        parser.error(f"{error}: pip install {arguments.service}")


if __name__ == "__main__":
    main()
