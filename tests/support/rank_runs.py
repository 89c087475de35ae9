"""The small run that tests of several ranks make, on top of program_runs: what it trains on, and
how it is started."""

import json

from program_runs import CONFIG, HERE, WORDS, run


def train_arguments(save, *flags):
    return ["train", "--model", HERE.folder / "config.json", "--data-path", HERE.folder / "corpus",
            "--lr", "1e-3", "--compute-dtype", "fp64", "--micro-batch-size", "2",
            "--global-batch-size", "8", "--split", "90,10,0", "--threads", "2", "--save", save,
            *flags]


def make_corpus():
    """The model's description and a data set, in HERE.folder."""
    (HERE.folder / "config.json").write_text(json.dumps(CONFIG))
    documents = [" ".join(WORDS[(i * j + i) % len(WORDS)] for j in range(40)) for i in range(200)]
    (HERE.folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents))
    done = run("tokenize", "--input", HERE.folder / "corpus.jsonl", "--output-prefix",
               HERE.folder / "corpus")
    assert done.returncode == 0, done.stderr
