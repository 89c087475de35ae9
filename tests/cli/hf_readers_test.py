#!/usr/bin/env python3
"""Hugging Face folders before and after Troupe, read by Hugging Face's own programs: every field of
AutoConfig, the encodings of AutoTokenizer, chat template and generation settings, with transformers
4 and 5 (scripts/install_dependencies.sh readers). Skipped, and reported so, where they are missing.

Usage: hf_readers_test.py TROUPE SOURCE_FOLDER
"""

import json
import os
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run

SHAPE = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
         "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False,
         "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 2, "use_cache": True}
# As files on the hub are, in the older dialect; and none of the values is a default.
OLDER = {"rope_theta": 1000000.0, "rope_scaling": None, "torch_dtype": "float32",
         "transformers_version": "4.51.0"}
NEWER = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "dtype": "float32",
         "transformers_version": "5.17.0"}
QWEN = {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_window_layers": 1, "use_sliding_window": False, "sliding_window": None,
        "output_router_logits": False, "router_aux_loss_coef": 0.002}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
           "intermediate_size": 32, "num_local_experts": 12, "num_experts_per_tok": 2,
           "sliding_window": None, "router_aux_loss_coef": 0.02, "output_router_logits": False,
           "router_jitter_noise": 0.0}
QWEN2_MOE = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
             "num_experts": 12, "shared_expert_intermediate_size": 48, "qkv_bias": True}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
             "head_dim": 16, "attention_bias": False}
SOURCES = {
    "mixtral": SHAPE | OLDER | MIXTRAL,
    "qwen2_moe": SHAPE | OLDER | QWEN | QWEN2_MOE,
    "qwen3_moe": SHAPE | OLDER | QWEN | QWEN3_MOE | {"num_experts": 12},
    "olmoe": SHAPE | OLDER | {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "intermediate_size": 32,
        "num_experts": 12, "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": None,
        "attention_bias": False, "pad_token_id": 1, "output_router_logits": False,
        "router_aux_loss_coef": 0.01},
    "llama": SHAPE | OLDER | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 48,
        "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    "qwen3": SHAPE | OLDER | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": 48,
        "head_dim": 16, "attention_bias": False, "max_window_layers": 2,
        "use_sliding_window": False, "sliding_window": None},
    "qwen2_moe_5": SHAPE | NEWER | QWEN | QWEN2_MOE | {
        "sliding_window": 0, "layer_types": ["full_attention"] * 2},
    "qwen3_moe_5": SHAPE | NEWER | QWEN | QWEN3_MOE | {"num_local_experts": 12},
}
MOE = [name for name in SOURCES if name not in ("llama", "qwen3")]
PAGE = """The mill runs by the river.  Two  spaces,\ttabs and\r\nline ends; don't we'll I'VE it's.
Zahlen: 3,14159 und 2026-11-22. Größe, naïve café, Ελληνικά, русский язык, עברית, हिन्दी, 漢字とかな.
🦀🎉 👩‍👩‍👧‍👦 e\u0301 ﬁ \u200b <|im_start|>user<|im_end|><|endoftext|> <html>&amp;</html>
    def f(x): return x**2  # indented
""" + "".join(chr(code) for code in range(32, 0x250))

VERSIONS = ("4", "5")


def libraries_of(version):
    return HERE.source / "build-dependencies" / f"transformers-{version}"


def missing_readers():
    """Why the readers cannot be run; empty when they can."""
    for version in VERSIONS:
        if not (libraries_of(version) / "transformers").is_dir():
            return (f"no transformers {version} in {libraries_of(version)}: "
                    "bash scripts/install_dependencies.sh readers installs it from PyPI")
    return ""


def reader(version, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(libraries_of(version)), "HF_HUB_OFFLINE": "1",
                   "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run([sys.executable, str(HERE.source / "tests/support/hf_reader.py"),
                           *map(str, arguments)], env=environment, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def troupe(*arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done


def train(model, save, *flags):
    troupe("train", "--model", model, "--data-path", HERE.folder / "corpus", "--seq-length", 16,
           "--lr", "1e-3", "--train-iters", 1, "--global-batch-size", 2, "--split", "1,0,0",
           "--save", save, "--threads", 1, "--quiet", *flags)


def make_source(name):
    """A folder as a hub has it; its weights come from a model that is trained for a step."""
    folder = HERE.folder / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SOURCES[name], indent=2))
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model",
                 HERE.folder / "tokenizer")
    train(folder / "config.json", HERE.folder / f"{name}_run", *tokenizer)
    own = HERE.folder / f"{name}_own"
    troupe("convert", "--load", HERE.folder / f"{name}_run", "--save", own)
    (folder / "model.safetensors").write_bytes((own / "model.safetensors").read_bytes())
    for file in (HERE.folder / "tokenizer").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


def export_all(name):
    """The folder converted directly, and after a step of one rank and of TP2 x EP2."""
    folder = HERE.folder / name
    weights = ("--pretrained-checkpoint", folder, "--tokenizer-type", "HuggingFaceTokenizer",
               "--tokenizer-model", folder)
    layout = ("--ranks", 4 if name in MOE else 2, "--tensor-model-parallel-size", 2)
    if name in MOE:
        layout += ("--expert-model-parallel-size", 2, "--sequence-parallel")
    train(folder, HERE.folder / f"{name}_one", *weights)
    train(folder, HERE.folder / f"{name}_tp2_ep2", *weights, *layout)
    troupe("convert", "--load", folder, "--save", HERE.folder / f"{name}_copied")
    for run_name in ("one", "tp2_ep2"):
        troupe("convert", "--load", HERE.folder / f"{name}_{run_name}",
               "--save", HERE.folder / f"{name}_{run_name}_hf")


def setUpModule():
    if missing_readers():
        raise unittest.SkipTest(missing_readers())
    (HERE.folder / "tokenizer").mkdir()
    reader("5", "make-tokenizer", HERE.folder / "tokenizer")
    (HERE.folder / "page.txt").write_text(PAGE, encoding="utf-8")
    troupe("tokenize", "--quiet", "--input", HERE.folder / "page.txt", "--output-prefix",
           HERE.folder / "corpus", "--tokenizer-type", "HuggingFaceTokenizer",
           "--tokenizer-model", HERE.folder / "tokenizer", "--split-documents", 1)
    for name in SOURCES:
        make_source(name)
        export_all(name)


class HfReaders(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        folders = [str(HERE.folder / f"{name}{suffix}") for name in SOURCES
                   for suffix in ("", "_own", "_copied", "_one_hf", "_tp2_ep2_hf")]
        cls.read = {version: json.loads(reader(version, "read", HERE.folder / "page.txt", *folders))
                    for version in VERSIONS}

    def found(self, version, name):
        return self.read[version][str(HERE.folder / name)]

    def test_every_reader_sees_what_the_source_has(self):
        for version in VERSIONS:
            for name in SOURCES:
                for export in ("copied", "one_hf", "tp2_ep2_hf"):
                    with self.subTest(transformers=version, model=name, export=export):
                        self.assertEqual(self.found(version, f"{name}_{export}"),
                                         self.found(version, name))

    def test_a_folder_that_is_copied_stays_as_it_is(self):
        for name in SOURCES:
            for export in ("copied", "one_hf"):
                copy = HERE.folder / f"{name}_{export}"
                for file in (HERE.folder / name).iterdir():
                    if export == "one_hf" and file.suffix == ".safetensors":
                        continue
                    self.assertEqual((copy / file.name).read_bytes(), file.read_bytes(),
                                     f"{copy}/{file.name}")

    def test_models_of_our_own_are_read_alike_by_all(self):
        for version in VERSIONS:
            for name, source in SOURCES.items():
                with self.subTest(transformers=version, model=name):
                    own = self.found(version, f"{name}_own")
                    theta = source.get("rope_theta") or source["rope_parameters"]["rope_theta"]
                    config = own["config"]
                    self.assertEqual(config.get("rope_theta", theta), theta)
                    if version == "5":
                        self.assertEqual(config["rope_parameters"]["rope_theta"], theta)
                    else:
                        self.assertEqual(config["rope_theta"], theta)
                    if name in MOE:
                        experts = {own["num_experts"], own["num_local_experts"]} - {None}
                        self.assertEqual(experts, {12})
                    for field in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "use_cache",
                                  "num_hidden_layers", "vocab_size", "model_type"):
                        self.assertEqual(config[field], source[field], field)
                    dtype = config.get("dtype") or config.get("torch_dtype")
                    self.assertEqual(dtype, "float32")
                    self.assertEqual(config["bos_token_id"], 0)
                    self.assertEqual(config["eos_token_id"], 2)
                    self.assertEqual(own["ids"], self.found(version, name)["ids"])
                    self.assertEqual(own["chat"], self.found(version, name)["chat"])

    def test_the_tokenizer_encodes_as_troupe_does(self):
        """The reader's ids are those that generate and train see."""
        ids = self.found("5", "qwen3_moe_one_hf")["ids"]
        self.assertGreater(len(ids), 300)
        self.assertEqual(self.found("4", "qwen3_moe_one_hf")["ids"], ids)
        index = (HERE.folder / "corpus.bin").read_bytes()
        width = 2 if len(index) < 4 * len(ids) else 4
        ours = [int.from_bytes(index[at:at + width], "little")
                for at in range(0, len(index), width)]
        self.assertEqual([token for token in ours if token > 2],
                         [token for token in ids if token > 2])

    def test_another_dtype_changes_that_field_alone(self):
        out = HERE.folder / "in_bf16"
        troupe("convert", "--load", HERE.folder / "qwen3_moe_one", "--save", out, "--dtype", "bf16")
        source = json.loads((HERE.folder / "qwen3_moe/config.json").read_text())
        self.assertEqual(json.loads((out / "config.json").read_text()),
                         source | {"torch_dtype": "bfloat16"})

    def test_what_the_model_changed_is_changed_in_the_spelling_of_the_source(self):
        for name in ("qwen3_moe", "qwen3_moe_5"):
            save, out = HERE.folder / f"{name}_changed", HERE.folder / f"{name}_changed_hf"
            train(HERE.folder / name, save, "--pretrained-checkpoint", HERE.folder / name,
                  "--rotary-base", 2e4, "--max-position-embeddings", 128, "--tokenizer-type",
                  "HuggingFaceTokenizer", "--tokenizer-model", HERE.folder / name)
            troupe("convert", "--load", save, "--save", out)
            source = json.loads((HERE.folder / name / "config.json").read_text())
            wanted = source | {"max_position_embeddings": 128}
            if "rope_theta" in source:
                wanted["rope_theta"] = 2e4
            else:
                wanted["rope_parameters"] = source["rope_parameters"] | {"rope_theta": 2e4}
            self.assertEqual(json.loads((out / "config.json").read_text()), wanted)

    def test_a_model_of_bytes_takes_its_tokenizer_along(self):
        troupe("tokenize", "--quiet", "--input", HERE.folder / "page.txt", "--output-prefix",
               HERE.folder / "bytes", "--split-documents", 1)
        troupe("train", "--model", "olmoe-tiny", "--data-path", HERE.folder / "bytes",
               "--seq-length", 16, "--lr", "1e-3", "--train-iters", 1, "--split", "1,0,0",
               "--save", HERE.folder / "bytes_run", "--threads", 1, "--quiet")
        out = HERE.folder / "bytes_hf"
        troupe("convert", "--load", HERE.folder / "bytes_run", "--save", out)
        for version in VERSIONS:
            found = json.loads(reader(version, "read", HERE.folder / "page.txt", out))[str(out)]
            text = PAGE.replace("<|endoftext|>", "\0").encode()
            self.assertEqual(found["ids"], [256 if byte == 0 else byte for byte in text])
            self.assertEqual(found["config"]["eos_token_id"], 256)
        # Laid out as transformers writes it.
        tokens = {"_from_model_config": True, "bos_token_id": None, "eos_token_id": 256}
        self.assertEqual((out / "generation_config.json").read_text(),
                         json.dumps(tokens, indent=2) + "\n")
        done = troupe("generate", "--load", out, "--prompt", "The mill", "--max-new-tokens", 4,
                      "--temperature", 0)
        again = troupe("generate", "--load", HERE.folder / "bytes_run", "--prompt", "The mill",
                       "--max-new-tokens", 4, "--temperature", 0)
        self.assertEqual(done.stdout, again.stdout)
        self.assertNotIn("holds no tokenizer", done.stderr)


if __name__ == "__main__":
    main()
