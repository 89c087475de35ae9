#!/usr/bin/env python3
"""What is loaded, and what is said of it: damaged checkpoints beside complete ones, folders with
weights that no flag asks for, weights that are not finite, checkpoints of another dtype, evaluation
as in training, folders without a tokenizer, models without a Hugging Face form.

Usage: loaded_models_test.py TROUPE SOURCE_FOLDER
"""

import json
import shutil
import struct
import sys
import pathlib
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import CONFIG, HERE, main, run, write_config, write_corpus
from safetensors_files import read_tensors, write_tensors

QUICK = ("--threads", 1)


def train(save, *flags, model=None, steps=2):
    return run("train", "--model", model or HERE.folder / "config.json", "--data-path",
               HERE.folder / "corpus", "--seq-length", 32, "--lr", "1e-3", "--train-iters", steps,
               "--global-batch-size", 2, "--split", "1,1,0", "--save", save, *QUICK, *flags)


def floats(contents):
    return struct.unpack(f"<{len(contents) // 4}f", contents)


def to_bf16(value):
    """To nearest, ties to even, by integers alone."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).to_bytes(2, "little")


def setUpModule():
    write_config(max_position_embeddings=64)
    write_corpus(30, 40)
    base = HERE.folder / "base"
    done = train(base, "--save-interval", 1)
    assert done.returncode == 0, done.stderr
    done = run("convert", "--load", base, "--save", HERE.folder / "hf")
    assert done.returncode == 0, done.stderr


class QuantisedFolders(unittest.TestCase):
    def convert(self, source, name, *flags):
        done = run("convert", "--load", source, "--save", HERE.folder / name, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return HERE.folder / name

    def method(self, folder):
        config = json.loads((folder / "config.json").read_text())
        return config.get("quantization_config", {}).get("quant_method")

    def test_a_quantised_folder_comes_back_and_trains(self):
        first = self.convert(HERE.folder / "hf", "fp8", "--dtype", "fp8-block")
        self.assertEqual(self.method(first), "fp8")
        dtypes = {dtype for dtype, _, _ in read_tensors(first / "model.safetensors").values()}
        self.assertEqual(dtypes, {"F8_E4M3", "F32"})
        again = self.convert(first, "fp8_again")
        for file in ("config.json", "model.safetensors"):
            self.assertEqual((first / file).read_bytes(), (again / file).read_bytes(), file)
        plain = self.convert(first, "fp8_in_fp32", "--dtype", "fp32")
        self.assertIsNone(self.method(plain))
        # Steps of two ranks from either folder end in the same bits.
        ends = []
        for folder in (first, plain):
            save = HERE.folder / f"run_{folder.name}"
            done = train(save, "--pretrained-checkpoint", folder, "--ranks", 2,
                         "--tensor-model-parallel-size", 2, "--expert-model-parallel-size", 2,
                         "--expert-tensor-parallel-size", 1, model=folder)
            self.assertEqual(done.returncode, 0, done.stderr)
            out = self.convert(save, f"end_{folder.name}")
            self.assertIsNone(self.method(out), "trained weights are not quantised unless asked")
            ends.append((out / "model.safetensors").read_bytes())
        self.assertEqual(*ends)

    def test_a_form_that_the_architecture_lacks_is_refused(self):
        done = run("convert", "--load", HERE.folder / "hf", "--save", HERE.folder / "fp4",
                   "--dtype", "mxfp4")
        self.assertEqual(done.returncode, 2)
        self.assertIn("are not written as mxfp4", done.stderr)
        self.assertFalse((HERE.folder / "fp4").exists())


class ConvertedFiles(unittest.TestCase):
    def test_no_file_is_larger_than_what_was_asked_for(self):
        folder = HERE.folder / "sharded"
        folder.mkdir()
        config = json.loads((HERE.folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {
            "hidden_size": 128, "num_experts": 16}))
        save = HERE.folder / "sharded_run"
        done = run("train", "--model", folder / "config.json", "--mock-data", "--lr", "1e-3",
                   "--train-iters", 1, "--seq-length", 16, "--threads", 1, "--save", save)
        self.assertEqual(done.returncode, 0, done.stderr)
        done = run("convert", "--load", save, "--save", folder / "hf", "--max-shard-megabytes", 1)
        self.assertEqual(done.returncode, 0, done.stderr)
        # A file has 8 bytes and a header before its tensors, of which none has more than 140 kB.
        sizes = []
        for path in folder.glob("hf/*.safetensors"):
            contents = path.read_bytes()
            sizes.append(len(contents) - 8 - struct.unpack("<Q", contents[:8])[0])
        self.assertGreater(len(sizes), 1)
        self.assertLessEqual(max(sizes), 1_000_000)
        self.assertGreater(max(sizes), 860_000)


class LoadedModels(unittest.TestCase):
    def setUp(self):
        self.out = HERE.folder / self.id().rsplit(".", 1)[-1]

    def done(self, done):
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def refused(self, done, status, *parts):
        self.assertEqual(done.returncode, status, done.stderr)
        for part in parts:
            self.assertIn(part, done.stderr)

    # ---- Damaged checkpoints ----

    def damaged(self):
        """A copy of the run whose newest checkpoint is damaged."""
        runs = self.out / "damaged"
        shutil.copytree(HERE.folder / "base", runs)
        (runs / "checkpoints/step_00000002/COMMIT").write_text("x\n")
        return runs

    def test_an_older_checkpoint_is_not_taken_silently(self):
        runs = self.damaged()
        both = ("of step 2, is damaged", "that of step 1", "COMMIT")
        evaluated = self.done(run("eval", "--load", runs, "--data-path", HERE.folder / "corpus",
                                  "--split", "1,1,0", *QUICK))
        generated = self.done(run("generate", "--load", runs, "--max-new-tokens", 1, *QUICK))
        trained = self.done(train(self.out / "new", "--pretrained-checkpoint", runs, steps=1))
        for done in (evaluated, generated, trained):
            self.assertIn("Warning: ", done.stderr)
            for part in both:
                self.assertIn(part, done.stderr)

    def test_convert_refuses_an_older_checkpoint_unless_it_is_named(self):
        runs = self.damaged()
        self.refused(run("convert", "--load", runs, "--save", self.out / "hf"), 1,
                     "of step 2, is damaged", "--ckpt-step 1 converts that one")
        self.assertFalse((self.out / "hf").exists())
        done = self.done(run("convert", "--load", runs, "--ckpt-step", 1, "--save", self.out / "hf"))
        self.assertNotIn("is damaged", done.stderr)

    def test_a_checkpoint_keeps_its_prediction_layers(self):
        convert = ["convert", "--load", HERE.folder / "base", "--mtp-num-layers"]
        self.refused(run(*convert, 1, "--save", self.out / "more"), 2,
                     "--mtp-num-layers 1: the checkpoint has 0, which are kept. Leave the flag out.")
        self.assertFalse((self.out / "more").exists())
        self.done(run(*convert, 0, "--save", self.out / "same"))

    def test_an_older_damaged_checkpoint_does_not_matter(self):
        runs = self.damaged()
        shutil.rmtree(runs)
        shutil.copytree(HERE.folder / "base", runs)
        (runs / "checkpoints/step_00000001/COMMIT").write_text("x\n")
        done = self.done(run("convert", "--load", runs, "--save", self.out / "hf"))
        self.assertNotIn("is damaged", done.stderr)

    def test_a_flipped_byte_names_the_complete_one_before_it(self):
        runs = self.out / "flipped"
        shutil.copytree(HERE.folder / "base", runs)
        shard, = (runs / "checkpoints/step_00000002").glob("shard_*.safetensors")
        contents = bytearray(shard.read_bytes())
        header = json.loads(contents[8:(begin := 8 + struct.unpack("<Q", contents[:8])[0])])
        first, = (each["data_offsets"][0] for name, each in header.items()
                  if name.startswith("embedding"))
        contents[begin + first] ^= 1
        shard.write_bytes(contents)
        for done in self.use(runs):
            self.refused(done, 1, "does not have the hash that was saved; load the complete one "
                                  "before it, of step 1")

    def test_a_save_that_is_under_way_is_no_damage(self):
        runs = self.out / "live"
        shutil.copytree(HERE.folder / "base", runs)
        (runs / "checkpoints/.tmp_step_00000003_77").mkdir()
        for done in self.use(runs):
            self.assertNotIn("damaged", self.done(done).stderr)

    # ---- Random weights that are not meant ----

    def test_a_folder_with_weights_needs_a_word_about_them(self):
        hf = HERE.folder / "hf"
        self.refused(train(self.out, model=hf), 2, "the folder holds weights",
                     f"--pretrained-checkpoint {hf}", f"--model {hf}/config.json")
        self.assertFalse(self.out.exists())
        self.done(train(self.out / "shape", model=hf / "config.json"))
        done = self.done(train(self.out / "weights", "--pretrained-checkpoint", hf,
                               "--exit-after-step", 1, model=hf))
        self.assertIn(f"Weights from {hf}.", done.stderr)
        self.done(train(self.out / "weights", "--load", self.out / "weights", model=hf))

    def test_a_folder_without_expert_biases_gives_them_none(self):
        hf = HERE.folder / "hf"
        self.done(train(self.out / "biased", "--pretrained-checkpoint", hf, "--exit-after-step", 1,
                        "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias",
                        "--moe-router-bias-update-rate", 0.125, model=hf))
        saved = self.out / "biased/checkpoints/step_00000001/shard_00000_00000.safetensors"
        biases = [number for name, (_, _, contents) in read_tensors(saved).items()
                  if "expert_bias" in name for number in floats(contents)]
        self.assertEqual({abs(bias) for bias in biases} - {0, 0.125}, set(), "one update from zero")
        self.assertGreater(len(biases), 0)

    # ---- Weights that are not finite ----

    def use(self, runs):
        """Every command that uses a saved model."""
        return (run("eval", "--load", runs, "--data-path", HERE.folder / "corpus", *QUICK),
                run("generate", "--load", runs, "--max-new-tokens", 1, *QUICK),
                run("convert", "--load", runs, "--save", self.out / "hf"))

    def test_weights_that_are_not_finite_are_named(self):
        self.done(train(self.out / "run", "--lr", "1e39", "--lr-decay-style", "constant", steps=1))
        for done in self.use(self.out / "run"):
            self.refused(done, 1, "the tensor ", "is not finite as f32", "earlier checkpoint")
            self.assertNotIn("nan", done.stdout)
        self.assertFalse((self.out / "hf").exists())

    def test_a_loss_that_is_not_finite_is_no_result(self):
        shutil.copytree(HERE.folder / "hf", self.out / "run")
        tensors = read_tensors(self.out / "run/model.safetensors")
        for name in ("model.norm.weight", "lm_head.weight"):  # finite, and their products are not
            dtype, shape, contents = tensors[name]
            tensors[name] = (dtype, shape, struct.pack("<f", 3e38) * (len(contents) // 4))
        write_tensors(self.out / "run/model.safetensors", tensors)
        evaluated, generated, _ = self.use(self.out / "run")
        self.refused(evaluated, 1, "The validation loss of", "(step 0) is ")
        self.refused(generated, 1, "not finite")
        self.assertEqual(evaluated.stdout, "")

    # ---- Names and reasons ----

    def test_a_name_of_ten_megabytes_is_cut_in_the_message(self):
        hf = self.out / "hf"
        shutil.copytree(HERE.folder / "hf", hf)
        tensors = read_tensors(hf / "model.safetensors")
        tensors["x" * 10_000_000] = ("F32", [1], b"\0" * 4)
        write_tensors(hf / "model.safetensors", tensors)
        done = run("convert", "--load", hf, "--save", self.out / "copy")
        self.refused(done, 2, "has no place in a Qwen3MoeForCausalLM")
        self.assertLess(len(done.stderr), 1000)

    def test_foreign_architectures_are_told_what_comes_nearest(self):
        path = HERE.folder / "jamba.json"
        path.write_text(json.dumps(CONFIG | {"architectures": ["JambaForCausalLM"]}))
        self.refused(run("plan", "--model", path), 2,
                     "(missing: Mamba layers; MixtralForCausalLM comes nearest)")

    def test_all_reasons_are_named_the_architecture_first(self):
        config = CONFIG | {"architectures": ["Qwen2ForCausalLM"], "hidden_act": "gelu",
                           "rope_scaling": {"type": "dynamic", "factor": 40},
                           "partial_rotary_factor": 0.5}
        path = HERE.folder / "foreign.json"
        path.write_text(json.dumps(config))
        done = run("plan", "--model", path)
        self.refused(done, 2, "biases of queries", "LlamaForCausalLM comes nearest",
                     'RoPE of type "dynamic"', '"partial_rotary_factor"', '"hidden_act": "gelu"')
        self.assertLess(done.stderr.index("Qwen2ForCausalLM"), done.stderr.index("dynamic"))

    def test_a_model_without_a_hugging_face_form_says_so_at_once(self):
        flags = ("--moe-router-score-function", "sqrtsoftplus", "--normalization", "LayerNorm")
        for done in (self.done(train(self.out / "run", *flags, steps=1)),
                     self.done(run("plan", "--model", HERE.folder / "config.json", *flags))):
            said = " ".join((done.stderr + done.stdout).split())
            self.assertIn('moe_router_score_function = "sqrtsoftplus"', said)
            self.assertIn('normalization = "LayerNorm"', said)
            self.assertIn("this model has no Hugging Face form", said)
        self.refused(run("convert", "--load", self.out / "run", "--save", self.out / "hf"), 2,
                     "no Hugging Face form")

    # ---- Other dtypes ----

    def masters(self, save):
        folder = sorted((save / "checkpoints").glob("step_*"))[0]
        tensors = {}
        for shard in folder.glob("*.safetensors"):
            tensors |= read_tensors(shard)
        return tensors

    def test_an_fp32_checkpoint_starts_a_bf16_run_and_the_reverse(self):
        base = HERE.folder / "base"
        wide = read_tensors(base / "checkpoints/step_00000002/shard_00000_00000.safetensors")
        for flags in (("--finetune", "--load", base), ("--pretrained-checkpoint", base)):
            save = self.out / flags[0][2:]
            # A learning rate of 0 keeps the weights as they were loaded.
            self.done(train(save, *flags, "--bf16", "--lr", 0, "--weight-decay", 0, steps=1))
            for name, (dtype, _, contents) in self.masters(save).items():
                if name.startswith("master."):
                    self.assertEqual(contents, wide[name[len("master."):]][2], name)
                elif name in wide and dtype == "BF16":
                    rounded = b"".join(map(to_bf16, floats(wide[name][2])))
                    self.assertEqual(contents, rounded, name)
        narrow = self.out / "pretrained-checkpoint"
        again = self.out / "again"
        self.done(train(again, "--pretrained-checkpoint", narrow, "--lr", 0, "--weight-decay", 0,
                        steps=1))
        found = self.masters(again)
        for name, (dtype, _, contents) in wide.items():
            if not name.startswith("exp_avg"):
                self.assertEqual(found[name][2], contents, name)

    def test_convert_rounds_to_the_dtype_that_is_asked_for(self):
        hf = read_tensors(HERE.folder / "hf/model.safetensors")
        self.done(run("convert", "--load", HERE.folder / "base", "--save", self.out / "bf16",
                      "--dtype", "bf16"))
        self.done(run("convert", "--load", HERE.folder / "hf", "--save", self.out / "fp16",
                      "--dtype", "fp16"))
        halves = read_tensors(self.out / "fp16/model.safetensors")
        for name, (dtype, shape, contents) in read_tensors(self.out / "bf16/model.safetensors").items():
            self.assertEqual((dtype, shape), ("BF16", hf[name][1]))
            self.assertEqual(contents, b"".join(map(to_bf16, floats(hf[name][2]))), name)
            self.assertEqual(halves[name][0], "F16")
            self.assertEqual(halves[name][2],
                             b"".join(struct.pack("<e", value) for value in floats(hf[name][2])))
        config = json.loads((self.out / "bf16/config.json").read_text())
        self.assertEqual((config["dtype"], config["torch_dtype"]), ("bfloat16", "bfloat16"))
        # fp32 of a bf16 run are its master weights.
        self.done(train(self.out / "narrow", "--bf16", steps=1))
        self.done(run("convert", "--load", self.out / "narrow", "--save", self.out / "wide",
                      "--dtype", "fp32"))
        masters = self.masters(self.out / "narrow")
        self.assertEqual(read_tensors(self.out / "wide/model.safetensors")["model.norm.weight"][2],
                         masters["final_norm"][2])
        self.assertEqual(
            read_tensors(self.out / "wide/model.safetensors")["model.embed_tokens.weight"][2],
            masters["master.embedding"][2])

    def test_convert_rounds_fp64_once(self):
        """Just above the middle between two bf16 (fp16) numbers: fp32 has the middle itself."""
        source = self.out / "fp64"
        source.mkdir(parents=True)
        shutil.copy(HERE.folder / "hf/config.json", source)
        tensors = {name: ("F64", shape, struct.pack(f"<{len(contents) // 4}d", *floats(contents)))
                   for name, (_, shape, contents) in
                   read_tensors(HERE.folder / "hf/model.safetensors").items()}
        for dtype, bits, expected in ("bf16", 8, 0x3f81), ("fp16", 11, 0x3c01):
            shape = tensors["model.norm.weight"][1]
            tensors["model.norm.weight"] = (
                "F64", shape, struct.pack("<d", 1 + 2.0 ** -bits + 2.0 ** -40) * shape[0])
            write_tensors(source / "model.safetensors", tensors)
            self.done(run("convert", "--load", source, "--save", self.out / dtype, "--dtype", dtype))
            found = read_tensors(self.out / dtype / "model.safetensors")["model.norm.weight"][2]
            self.assertEqual(found, struct.pack("<H", expected) * shape[0])

    # ---- Evaluation and tokenizers ----

    def test_eval_prints_what_train_printed(self):
        done = self.done(train(self.out, "--eval-interval", 2, "--eval-iters", 3,
                               "--micro-batch-size", 2, "--global-batch-size", 4, "--seed", 7))
        lines = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        trained = [line["val_loss"] for line in lines if "val_loss" in line][-1]
        done = self.done(run("eval", "--load", self.out, "--data-path", HERE.folder / "corpus",
                             "--json", *QUICK))
        self.assertEqual(json.loads(done.stdout)["val_loss"], trained)
        told = self.done(run("eval", "--load", self.out, "--data-path", HERE.folder / "corpus",
                             "--json", "--eval-iters", 1, "--micro-batch-size", 1, *QUICK))
        self.assertEqual(json.loads(told.stdout)["tokens"], 4 * 32)

    def test_eval_takes_as_many_batches_as_training(self):
        self.done(train(self.out, "--eval-interval", 2, "--eval-iters", 1, "--micro-batch-size", 2))
        done = self.done(run("eval", "--load", self.out, "--data-path", HERE.folder / "corpus",
                             "--json", *QUICK))
        self.assertEqual(json.loads(done.stdout)["tokens"], 2 * 32)

    def test_generate_says_when_a_folder_has_no_tokenizer(self):
        hf = self.out / "hf"
        shutil.copytree(HERE.folder / "hf", hf)
        done = self.done(run("generate", "--load", hf, "--max-new-tokens", 1, *QUICK))
        self.assertNotIn("no tokenizer", done.stderr)
        (hf / "tokenizer.json").unlink()
        done = self.done(run("generate", "--load", hf, "--max-new-tokens", 1, *QUICK))
        self.assertIn("holds no tokenizer", done.stderr)
        done = self.done(run("generate", "--load", hf, "--max-new-tokens", 1, "--tokenizer-type",
                             "byte", *QUICK))
        self.assertNotIn("no tokenizer", done.stderr)


if __name__ == "__main__":
    main()
