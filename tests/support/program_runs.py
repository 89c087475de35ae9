"""What tests of the whole program share: where it is, a folder to work in, small models and corpora.

A test file imports this module from the folder tests/support, and ends with main(), which takes the
program and the source folder from the command line. One process, one test file.
"""

import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest

# The status of a file whose tests were all skipped: ctest reports it so.
SKIPPED = 77

# Set by main(). `folder` is empty at first and is removed in the end.
HERE = types.SimpleNamespace(troupe="", source=pathlib.Path(), folder=pathlib.Path())

WORDS = "tin copper river of the a runs over stone and under bridge slow light mill wheel".split()
# A model of a few thousand parameters, for text in bytes.
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 272,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
}
# What makes of it an architecture whose folders have layers of multi-token prediction, with a bias
# of experts.
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}


def command(*arguments):
    return [HERE.troupe, *map(str, arguments)]


def run(*arguments, **options):
    """Runs troupe to its end."""
    return subprocess.run(command(*arguments), stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, errors="replace", check=False, **options)


def interrupt(*arguments):
    """Runs troupe until it catches SIGINT, sends that, and waits for the end."""
    with subprocess.Popen(command(*arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, errors="replace") as process:
        while process.poll() is None and not catches_sigint(process):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, error)


def catches_sigint(process):
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1


def json_in_form(text, indent):
    """The document in `text`; that text, and what it is with this indent (None: all in one line),
    both with 0.5 for each number with a point, which another program may write otherwise."""
    number = r"-?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)"
    plain = re.sub(rf'("(?:\\.|[^"\\])*")|{number}', lambda found: found[1] or "0.5", text)
    formed = json.dumps(json.loads(plain), indent=indent, ensure_ascii=False,
                        separators=None if indent else (",", ":"))
    return json.loads(text), plain, formed + "\n"


def write_config(**changes):
    (HERE.folder / "config.json").write_text(json.dumps(CONFIG | changes))


def write_corpus(documents, words, *flags, name="corpus"):
    """Tokenizes that many documents of that many words each; `flags` are those of tokenize."""
    generator = random.Random(name)
    text = HERE.folder / f"{name}.txt"
    text.write_text("\n\n".join(" ".join(generator.choice(WORDS) for _ in range(words))
                                for _ in range(documents)))
    done = run("tokenize", "--quiet", "--input", text, "--output-prefix", HERE.folder / name,
               "--split-documents", "1", *flags)
    assert done.returncode == 0, done.stderr


def metrics(save):
    """Lines of metrics.jsonl except headers, as far as there are any; one that is being written is
    left out."""
    try:
        text = (save / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "header" not in line]


def steps_done(save):
    return max((line["step"] for line in metrics(save) if "loss" in line), default=0)


def main():
    """Runs the tests of the file: FILE TROUPE SOURCE_FOLDER [UNITTEST_ARGUMENT...]."""
    HERE.troupe, HERE.source = sys.argv[1], pathlib.Path(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="troupe_test_") as folder:
        HERE.folder = pathlib.Path(folder)
        result = unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2, exit=False).result
    if result.testsRun == len(result.skipped) or (result.testsRun == 0 and result.skipped):
        for test, reason in result.skipped:
            print(f"SKIPPED {test}: {reason}")
        sys.exit(SKIPPED)
    sys.exit(0 if result.wasSuccessful() else 1)
