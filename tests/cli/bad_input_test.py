#!/usr/bin/env python3
"""Bad input of every kind, given to the program: files, configurations, weights, data, flags, disks.

Each case expects one message on standard error that says what is wrong and where, nothing on
standard output, exit status 1 or 2 (3 for what does not fit), and that what was saved before is as it
was. What the parsers refuse in detail is tested beside them (tests/io, tests/data); here are the
kinds, through the commands that people run.

Usage: bad_input_test.py TROUPE SOURCE_FOLDER
"""

import gzip
import hashlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
import program_runs
from program_runs import CONFIG, HERE, command, main, write_config

DEEP = "[" * 100_000 + "]" * 100_000
TIMEOUT_S = 60


def run(*arguments, **options):
    return program_runs.run(*arguments, timeout=TIMEOUT_S, **options)


def hashes(folder):
    """The name and the hash of everything below a folder."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def write(path, contents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    return path


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def read_safetensors(path):
    contents = path.read_bytes()
    length = struct.unpack_from("<Q", contents)[0]
    return json.loads(contents[8:8 + length]), contents[8 + length:]


def index_of(lengths, code=4, element=4):
    """The .idx of one document per sequence."""
    starts = [sum(lengths[:i]) * element for i in range(len(lengths))]
    return (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1) +
            struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(starts)}q", *starts) +
            struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1)))


def knows_all_data(index):
    """Does a checkpoint have the hash of all of its data, not of samples alone?"""
    try:
        return "xxh3" in json.loads(index.read_text())["training"]["data_hashes"][0]
    except FileNotFoundError:  # it has been replaced
        return False


def train(*flags, model=None, data=None, iters=3):
    return ["train", "--quiet", "--model", model or HERE.folder / "config.json", "--data-path",
            data or HERE.folder / "corpus", "--train-iters", iters, "--lr", "1e-3",
            "--lr-decay-style", "constant", "--threads", "1", "--split", "1",
            *(() if "--save" in flags else ("--no-save",)), *flags]


def limit_files(size):
    """The limit of a process under which no file may grow beyond `size`: a full disk for anyone."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def setUpModule():
    write_config()
    write(HERE.folder / "text.txt", "\n\n".join(f"document {i} of a small corpus" for i in range(40)))
    for arguments in (
            ["tokenize", "--quiet", "--input", HERE.folder / "text.txt", "--output-prefix",
             HERE.folder / "corpus", "--split-documents", "1"],
            train("--save", HERE.folder / "run", "--save-interval", "1"),
            ["convert", "--quiet", "--load", HERE.folder / "run", "--save", HERE.folder / "hf"]):
        done = run(*arguments)
        assert done.returncode == 0, done.stderr


class BadInput(unittest.TestCase):
    maxDiff = 4000

    def setUp(self):
        self.folder = HERE.folder / "scratch"
        self.folder.mkdir()
        self.before = {name: hashes(HERE.folder / name) for name in ("run", "hf")}
        self.data_before = [(HERE.folder / name).read_bytes() for name in ("corpus.bin", "corpus.idx")]

    def tearDown(self):
        shutil.rmtree(self.folder)
        for name, before in self.before.items():
            self.assertEqual(hashes(HERE.folder / name), before, "what was saved has changed")
        self.assertEqual([(HERE.folder / name).read_bytes() for name in ("corpus.bin", "corpus.idx")],
                         self.data_before)

    def refused(self, status, phrases, *arguments, **options):
        """Runs the program, which must refuse with one message that contains all phrases.

        Where `status` is None, 1 and 2 are both right: whose fault a broken file is may be argued.
        """
        with self.subTest(arguments=" ".join(map(str, arguments))[-300:]):
            done = run(*arguments, **options)
            self.assertIn(done.returncode, (1, 2) if status is None else (status,),
                          done.stderr[:2000])
            self.assertEqual(done.stdout, "")
            lines = done.stderr.splitlines()
            while lines and lines[0].startswith("Warning: "):
                lines.pop(0)
            self.assertTrue(lines and lines[0].startswith("troupe: "), done.stderr[:2000])
            self.assertEqual(done.stderr.count("troupe: "), 1, done.stderr[:2000])
            self.assertTrue(status == 3 or len(lines) == 1, done.stderr[:2000])
            self.assertLess(len(done.stderr), 2000)
            self.assertNotIn("internal error", done.stderr)
            for phrase in phrases if isinstance(phrases, list) else [phrases]:
                self.assertIn(str(phrase), done.stderr)

    # ---- Files of every kind ----

    def odd_files(self):
        """Things that are no readable file, and a part of the reason that names each."""
        folder = self.folder / "odd"
        folder.mkdir()
        (folder / "directory").mkdir()
        (folder / "loop").symlink_to(folder / "loop")
        (folder / "dangling").symlink_to(folder / "nowhere")
        os.mkfifo(folder / "pipe")
        write(folder / "empty", "")
        return folder

    def test_odd_files_as_configuration(self):
        odd = self.odd_files()
        for name, status in (("missing", 2), ("directory", None), ("loop", None), ("dangling", 2),
                             ("pipe", 1), ("empty", 1)):
            path = self.folder / name / "config.json"
            path.parent.mkdir()
            path.symlink_to(odd / name)
            self.refused(status, path.parent, *train(model=path.parent))

    def test_odd_files_as_weights(self):
        odd = self.odd_files()
        for name in ("directory", "loop", "dangling", "pipe", "empty"):
            model = self.folder / f"model_{name}"
            write(model / "config.json", json.dumps(CONFIG))
            (model / "model.safetensors").symlink_to(odd / name)
            status = 2 if name == "dangling" else 1
            self.refused(status, model, *train("--pretrained-checkpoint", model))

    def test_odd_files_as_data(self):
        odd = self.odd_files()
        for extension in ("bin", "idx"):
            for name in ("missing", "directory", "loop", "dangling", "pipe", "empty"):
                prefix = self.folder / f"{extension}_{name}"
                for other in ("bin", "idx"):
                    shutil.copy(HERE.folder / f"corpus.{other}", f"{prefix}.{other}")
                os.remove(f"{prefix}.{extension}")
                os.symlink(odd / name, f"{prefix}.{extension}")
                status = 1 if name in ("directory", "pipe", "empty") else 2
                self.refused(status, f"{prefix}.{extension}", *train(data=prefix))

    def test_unreadable_files(self):
        if os.geteuid() == 0:
            self.skipTest("root may read every file")
        path = write(self.folder / "config.json", json.dumps(CONFIG))
        path.chmod(0)
        self.refused(1, [path, "Permission denied"], *train(model=path))

    # ---- Configurations ----

    def test_configurations(self):
        def changed(**fields):
            return json.dumps({**CONFIG, **fields})

        cases = [
            ("", "JSON"), ("{", "JSON"), ("[]", "object"), ("null", "object"),
            (DEEP, "nested deeper"), ('{"a":' * 100_000, "nested deeper"),
            ('{"vocab_size": 1e999}', "JSON"), ('{"vocab_size": NaN}', "JSON"),
            ('{"a": 1, "a": 2}', "twice"), (b'{"\xff": 1}', "JSON"), (b"\x00" * 64, "JSON"),
            (" " * 2_000_000, "bytes long"),
            (json.dumps(CONFIG)[:-20], "JSON"),
            (changed(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
            (changed(architectures=["A" * 100_000]), "is not supported"),
            (changed(architectures=["A\n\x1b[31mB"]), "is not supported"),
            (changed(hidden_act="x" * 100_000), "hidden_act"),
            (changed(rope_scaling={"rope_type": "y\n" * 1000}), "RoPE"),
            (changed(num_experts_per_tok=5), "num_experts_per_tok"),
            (changed(num_experts_per_tok=0), "num_experts_per_tok"),
            (changed(num_experts=0), "num_local_experts"),
            (changed(num_attention_heads=3, num_key_value_heads=2), "num_attention_heads"),
            (changed(head_dim=7), "head size"),
            (changed(rope_theta=-1.0), "rope_theta"), (changed(rms_norm_eps=0), "rms_norm_eps"),
            (changed(mlp_only_layers=[7]), "mlp_only_layers"),
            (changed(decoder_sparse_step=-1), "decoder_sparse_step"),
        ]
        for field in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads",
                      "max_position_embeddings", "moe_intermediate_size"):
            for value in (0, -1, 2**31, 2**63, 2**64 + 1, 1e300, "64", True, [1], None):
                cases.append((changed(**{field: value}), field))
        for text, phrase in cases:
            path = write(self.folder / "config.json", text)
            self.refused(None, [path, phrase], "plan", "--model", path)

    def test_models_that_cannot_fit(self):
        path = write(self.folder / "config.json",
                     json.dumps({**CONFIG, "hidden_size": 2**20, "moe_intermediate_size": 2**20,
                                 "num_hidden_layers": 2}))
        self.refused(3, "needs", *train(model=path))

    # ---- Weights ----

    def changed_weights(self, change):
        """A copy of the model whose header and data are changed by a function."""
        header, data = read_safetensors(HERE.folder / "hf" / "model.safetensors")
        header, data = change(header, bytearray(data))
        return safetensors(header, bytes(data))

    def test_weights(self):
        name = "model.layers.0.mlp.experts.2.down_proj.weight"
        good = (HERE.folder / "hf" / "model.safetensors").read_bytes()

        def with_entry(**fields):
            def change(header, data):
                header[name].update(fields)
                return header, data
            return self.changed_weights(change)

        def with_value(value):
            def change(header, data):
                struct.pack_into("<f", data, header[name]["data_offsets"][0] + 12, value)
                return header, data
            return self.changed_weights(change)

        def without(header, data):
            begin, end = header.pop(name)["data_offsets"]
            for entry in header.values():
                if "data_offsets" in entry and entry["data_offsets"][0] >= end:
                    entry["data_offsets"] = [x - (end - begin) for x in entry["data_offsets"]]
            return header, data[:begin] + data[end:]

        def with_text(old, new):
            def change(header, data):
                return json.dumps(header).replace(old, new, 1).encode(), data
            return self.changed_weights(change)

        begin, end = read_safetensors(HERE.folder / "hf" / "model.safetensors")[0][name]["data_offsets"]
        cases = [
            (safetensors({}, length=2**63), "header would be"),
            (safetensors({}, length=3_000_000), "beyond the end"),
            (safetensors(DEEP.encode()), "header"),
            (safetensors(b'{"a":' * 100_000), '"a"'),
            (safetensors(b'{"a":{"dtype":"F32","shape":' + DEEP.encode() + b"}}"), '"a"'),
            (good[:4], "too short"), (good[:9], "beyond the end"),
            (good[:len(good) // 2], "truncated"), (good[:-1], "truncated"), (good + b"\0", "bytes"),
            (with_entry(data_offsets=[begin - 4, end - 4]), name),
            (with_entry(data_offsets=[begin, 2**63]), name),
            (with_entry(data_offsets=[end, begin]), name),
            (with_entry(data_offsets=[-1, end]), name),
            (with_entry(shape=[2**62, 2**62]), name),
            (with_entry(shape=[-16, -16]), name),
            (with_entry(shape=[1] * 20), name),
            (with_entry(dtype="F64"), name), (with_entry(dtype="Q4"), name),
            (with_entry(dtype="I32"), [name, "I32"]),
            (with_entry(shape=[16, 64]), [name, "[16, 64]"]),
            (self.changed_weights(without), [name, "missing"]),
            (with_text("experts.2.down_proj", "experts.1.down_proj"), ["experts.1", "twice"]),
            (with_text("experts.2.down_proj", "experts.9.down_proj"), "experts.9"),
            (with_value(float("nan")), [name, "not finite", "element 3"]),
            (with_value(float("-inf")), [name, "not finite", "element 3"]),
        ]
        model = self.folder / "model"
        write(model / "config.json", (HERE.folder / "hf" / "config.json").read_bytes())
        for contents, phrases in cases:
            path = write(model / "model.safetensors", contents)
            phrases = phrases if isinstance(phrases, list) else [phrases]
            self.refused(None, [path.parent, *phrases],
                         *train("--pretrained-checkpoint", model, "--save", self.folder / "new"))
            self.assertFalse((self.folder / "new").exists())

    def test_weights_in_shards(self):
        model = self.folder / "model"
        write(model / "config.json", (HERE.folder / "hf" / "config.json").read_bytes())
        header, _ = read_safetensors(HERE.folder / "hf" / "model.safetensors")
        names = [name for name in header if name != "__metadata__"]
        shard = "model-00001-of-00002.safetensors"
        shutil.copy(HERE.folder / "hf" / "model.safetensors", model / shard)
        index = model / "model.safetensors.index.json"
        whole = {name: shard for name in names}
        for text, phrase in (
                (DEEP, "nested deeper"), ("", "JSON"), ("{}", "weight_map"),
                (json.dumps({"weight_map": [1]}), "weight_map"),
                (json.dumps({"weight_map": {**whole, names[0]: 7}}), names[0]),
                (json.dumps({"weight_map": {**whole, names[0]: f"../{shard}"}}), names[0]),
                (json.dumps({"weight_map": {**whole, names[0]: "other"}}), names[0]),
                (json.dumps({"weight_map": {**whole, "ghost": shard}}), "ghost"),
                (json.dumps({"weight_map": {n: shard for n in names[1:]}}), names[0]),
                (json.dumps({"weight_map": whole})[:-9], "JSON")):
            write(index, text)
            self.refused(1, [model, phrase], *train("--pretrained-checkpoint", model))
        write(index, json.dumps({"weight_map": whole}))
        shutil.copy(model / shard, model / "model.safetensors")
        self.refused(2, [model, "holds both"], *train("--pretrained-checkpoint", model))

    def test_folders_that_hold_no_model(self):
        for command in ("eval", "generate", "convert"):
            flags = {"eval": ["--data-path", HERE.folder / "corpus"], "generate": ["--prompt", "x"],
                     "convert": ["--save", self.folder / "out"]}[command]
            for path in (self.folder / "missing", self.folder, HERE.folder / "text.txt"):
                self.refused(None, path, command, "--load", path, *flags)
        self.refused(2, self.folder, "verify", self.folder)

    # ---- Data ----

    def test_data(self):
        good_index = (HERE.folder / "corpus.idx").read_bytes()
        good_data = (HERE.folder / "corpus.bin").read_bytes()
        tokens = struct.pack("<80i", *range(80))
        cases = [
            (1, good_index, good_data[:-1], "truncated"), (1, good_index, b"", "truncated"),
            (1, good_index[:-1], good_data, "corpus"), (1, good_index[:20], good_data, "header"),
            (1, b"GARBAGE!!" + good_index[9:], good_data, "MMIDIDX"),
            (1, good_index[:18] + struct.pack("<Q", 2**61) + good_index[26:], good_data, "fit"),
            (1, index_of([80], code=6), tokens, "floating point"),
            (1, index_of([80], code=99), tokens, "99"),
            (1, index_of([-80]), tokens, "length"),
            (2, index_of([80]), struct.pack("<80i", *range(79), -1), "-1"),
            (2, index_of([80]), struct.pack("<80i", *range(79), 2**31 - 1), "2147483647"),
            (2, index_of([80]), struct.pack("<80i", *range(79), 257), "257"),
            (2, index_of([80], code=7, element=8)[:17] + b"\x05" + index_of([80], element=8)[18:],
             struct.pack("<80q", *range(79), 2**40), str(2**40)),
            (2, index_of([0]), b"", "tokens"),
            (2, index_of([]), b"", "tokens"),
        ]
        prefix = self.folder / "corpus"
        for status, index, data, phrase in cases:
            write(self.folder / "corpus.idx", index)
            write(self.folder / "corpus.bin", data)
            self.refused(status, [prefix, phrase], *train(data=prefix))

    def test_vocabulary_smaller_than_the_tokenizer(self):
        self.refused(2, ["257", "--vocab-size"], *train("--vocab-size", 100))

    def test_data_that_shrinks_while_it_is_read(self):
        for extension in ("bin", "idx"):
            shutil.copy(HERE.folder / f"corpus.{extension}", self.folder)
        save = self.folder / "save"
        process = subprocess.Popen(
            command(*train("--save", save, "--save-interval", 1, "--keep-checkpoints", 1,
                           data=self.folder / "corpus", iters=1_000_000)),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not list(save.glob("checkpoints/step_*")):
                self.assertIsNone(process.poll(), "the run ended by itself")
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            os.truncate(self.folder / "corpus.bin", 0)
            out, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
        self.assertEqual(process.returncode, 1, errors)
        self.assertEqual(out, "")
        self.assertEqual(len(errors.splitlines()), 1, errors)
        self.assertIn("became shorter", errors)
        done = run(*train("--load", save, "--exit-after-step", 1, iters=1_000_000))
        self.assertEqual(done.returncode, 0, done.stderr)

    # ---- Corpora ----

    def test_corpora(self):
        for text, phrases in (
                (DEEP, ["line 1", "array"]),
                ('{"text": "a"}\n{"text": ' + DEEP + "}", ["line 2", "array"]),
                ('{"text": "a"}\n{"text"', ["line 2", "JSON"]),
                ('{"text": 1e999}', ["line 1", "JSON"]),
                ('{"id": 1}', ["line 1", '"text"']),
                (b'{"text": "' + b"a" * 100_000 + b'\xff"}', ["line 1", "JSON"]),
                ("", ["no text"]), ("\n \n", ["no text"])):
            path = write(self.folder / "corpus.jsonl", text)
            self.refused(2, [path, *phrases], "tokenize", "--quiet", "--input", path,
                         "--output-prefix", self.folder / "out")
            self.assertEqual(list(self.folder.glob("out*")), [])
        odd = self.odd_files()
        for name in ("missing", "directory", "loop", "dangling"):
            self.refused(2, odd / name, "tokenize", "--input", odd / name, "--output-prefix",
                         self.folder / "out")

    def test_disk_full_while_tokenizing(self):
        path = write(self.folder / "text.txt", "word " * 100_000)
        shutil.copy(HERE.folder / "corpus.bin", self.folder / "out.bin")
        shutil.copy(HERE.folder / "corpus.idx", self.folder / "out.idx")
        before = hashes(self.folder)
        self.refused(1, ["out", "File too large"], "tokenize", "--quiet", "--input", path,
                     "--output-prefix", self.folder / "out", "--overwrite",
                     preexec_fn=limit_files(100_000))
        self.assertEqual(hashes(self.folder), before)

    # ---- Checkpoints ----

    def copy_of_run(self):
        """A run with one checkpoint, and that checkpoint's folder."""
        copy = self.folder / "run"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(HERE.folder / "run", copy)
        for step in (1, 2):
            shutil.rmtree(copy / "checkpoints" / f"step_{step:08d}", ignore_errors=True)
        return copy, copy / "checkpoints" / "step_00000003"

    def damages(self):
        def cut(name, size):
            def damage(folder):
                os.truncate(folder / name, size)
            return damage

        def flip(name):
            def damage(folder):
                contents = bytearray((folder / name).read_bytes())
                contents[-3] ^= 1
                (folder / name).write_bytes(contents)
            return damage

        def replace(name, kind):
            def damage(folder):
                os.remove(folder / name)
                if kind == "directory":
                    (folder / name).mkdir()
                elif kind == "loop":
                    (folder / name).symlink_to(folder / name)
            return damage

        shard = "shard_00000_00000.safetensors"
        size = (HERE.folder / "run" / "checkpoints" / "step_00000003" / shard).stat().st_size
        return ([cut(shard, at) for at in (0, 7, 200, size // 2, size - 1)] +
                [cut(name, at) for name in ("index.json", "COMMIT") for at in (0, 1, 16)] +
                [flip("index.json"), flip("COMMIT"), flip(shard)] +
                [replace(name, kind) for name in (shard, "index.json", "COMMIT")
                 for kind in ("missing", "directory", "loop")])

    def test_damaged_checkpoints_are_not_taken_for_a_new_run(self):
        for damage in self.damages():
            copy, checkpoint = self.copy_of_run()
            damage(checkpoint)
            before = hashes(copy)
            self.refused(1, checkpoint, *train("--load", copy, "--save", copy, iters=5))
            self.assertEqual(hashes(copy), before)

    def test_damaged_checkpoints_are_not_overwritten(self):
        copy, checkpoint = self.copy_of_run()
        os.truncate(checkpoint / "index.json", 10)
        before = hashes(copy)
        self.refused(2, [copy, "another run"], *train("--save", copy))
        self.assertEqual(hashes(copy), before)

    def test_damaged_checkpoints_elsewhere(self):
        copy, checkpoint = self.copy_of_run()
        os.truncate(checkpoint / "shard_00000_00000.safetensors", 100)
        for arguments in (["eval", "--load", copy, "--data-path", HERE.folder / "corpus", "--quiet"],
                          ["generate", "--load", copy, "--prompt", "x", "--quiet"],
                          ["convert", "--load", copy, "--save", self.folder / "out", "--quiet"],
                          train("--pretrained-checkpoint", copy),
                          train("--load", copy, "--finetune")):
            self.refused(1, checkpoint, *arguments)

    def test_a_damaged_newest_checkpoint_leaves_the_one_before(self):
        copy = self.folder / "run"
        shutil.copytree(HERE.folder / "run", copy)
        os.truncate(copy / "checkpoints" / "step_00000003" / "index.json", 10)
        done = run(*train("--load", copy, "--save", copy))
        self.assertEqual(done.returncode, 0, done.stderr)
        # A warning, also where nothing else is printed.
        self.assertIn("step_00000003", done.stderr)
        # Step 3 was done again. (The index also holds the options, which differ.)
        shard = pathlib.Path("checkpoints", "step_00000003", "shard_00000_00000.safetensors")
        self.assertEqual((copy / shard).read_bytes(), (HERE.folder / "run" / shard).read_bytes())

    def test_large_data_that_changed_are_refused_when_they_have_been_read(self):
        """More than is read whole before the first step, with one other byte among those that are
        not sampled: runs go on until all has been read."""
        tokens = (256 << 20) + 4096
        data, save = self.folder / "large", self.folder / "run_of_large"
        data.with_suffix(".idx").write_bytes(index_of([tokens], code=1, element=1))
        with open(data.with_suffix(".bin"), "wb") as file:
            file.truncate(tokens)
        arguments = train("--save", save, "--load", save, "--save-interval", 20, data=data,
                          iters=1_000_000)
        process = subprocess.Popen(command(*arguments), stdin=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not any(map(knows_all_data, save.glob("checkpoints/step_*/index.json"))):
                self.assertIsNone(process.poll(), "the run ended by itself")
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=TIMEOUT_S)[1]
        finally:
            process.kill()
        self.assertEqual(process.returncode, 130, errors)
        with open(data.with_suffix(".bin"), "r+b") as file:
            file.seek(tokens // 2 + 12345)
            file.write(b"\1")
        self.refused(2, ["other contents"], *arguments)

    def test_other_runs(self):
        run_folder = HERE.folder / "run"
        for flags, phrase in ((["--num-experts", 8], "another model"), (["--seed", 7], "--seed"),
                              (["--seq-length", 16], "--seq-length"),
                              (["--compute-dtype", "fp64"], "--compute-dtype")):
            arguments = train("--load", run_folder, "--save", run_folder, *flags)
            done = run(*arguments)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(phrase, done.stderr)
            self.assertEqual(done.stdout, "")
        self.refused(2, [run_folder, "--load"], *train("--save", run_folder))

    # ---- Flags ----

    def test_flags(self):
        for flags, phrase in (
                (["--finetune"], "--load"), (["--save-interval", 5], "--save"),
                (["--seq-length", 1000], "--seq-length"), (["--seq-length", 0], "--seq-length"),
                (["--micro-batch-size", 3, "--global-batch-size", 4], "--global-batch-size"),
                (["--micro-batch-size", 2**31 - 1], "--micro-batch-size"),
                (["--micro-batch-size", 2**31], "--micro-batch-size"),
                (["--min-lr", 1], "--min-lr"), (["--lr-warmup-iters", 3], "--lr-warmup-iters"),
                (["--lr-warmup-iters", 2**62], "--lr-warmup-iters"),
                (["--lr-decay-iters", 2**63 - 1], "--lr-decay-iters"),
                (["--weight-decay", "nan"], "--weight-decay"), (["--clip-grad", "inf"], "--clip-grad"),
                (["--adam-beta1", 1], "--adam-beta1"), (["--split", "a,b"], "--split"),
                (["--split", "0,0,0"], "--split"), (["--threads", -1], "--threads"),
                (["--cpu-kernels", "x86-64-v9"], "There are no CPU kernels for x86-64-v9"),
                (["--ranks", 0], "--ranks"), (["--num-experts", 1], "--moe-router-topk"),
                (["--hidden-size", 2**31 - 1], "--hidden-size"),
                (["--vocab-size", 10**20], "--vocab-size"),
                (["--rotary-base", 0.5], "--rotary-base"), (["--device", "x\n"], "x?"),
                (["--bf16", "--compute-dtype", "fp64"], "--compute-dtype"),
                (["--load", self.folder / "nowhere"], "nowhere"),
                (["--pretrained-checkpoint", self.folder / "nowhere"], "nowhere"),
                (["no\nsense" + "x" * 5000], "Unexpected argument")):
            self.refused(2, phrase, *train(*flags))
        for flags, phrase in (
                (["--layer", 2], "--layer 2: the model has layers 0 to 1"),
                (["--micro-batch", 4], "--micro-batch 4: the step has micro-batches 0 to 3"),
                (["--program", "eval", "--micro-batch", 0], "--micro-batch: only the program of")):
            self.refused(2, phrase, "inspect", "--model", HERE.folder / "config.json",
                         "--global-batch-size", 4, *flags)
        self.refused(2, "--train-iters", *train(iters=2**63 - 1))
        self.refused(2, "--train-iters", *train(iters=2**64))

    # ---- Disks ----

    def test_places_that_cannot_be_written(self):
        file = write(self.folder / "file", "text")
        for save in (file, file / "below", "/proc/nowhere"):
            self.refused(None, save, *train("--save", save))
        self.assertEqual(file.read_text(), "text")
        metrics = self.folder / "save" / "metrics.jsonl"
        metrics.mkdir(parents=True)
        self.refused(1, metrics, *train("--save", metrics.parent))
        self.refused(2, HERE.folder / "hf", "convert", "--load", HERE.folder / "run", "--save", HERE.folder / "hf")

    def test_a_model_without_a_hugging_face_form(self):
        saved = self.folder / "biased"
        done = run(*train("--moe-router-score-function", "sqrtsoftplus",
                          "--moe-router-enable-expert-bias", "--save", saved))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.refused(2, "moe_router_score_function", "convert", "--load", saved, "--save",
                     self.folder / "out")
        self.assertFalse((self.folder / "out").exists())

    def test_packed_text_on_standard_input(self):
        for flags in ([], ["--split-documents", 1], ["--input-format", "jsonl"]):
            done = subprocess.run(command("tokenize", "--input", "-", "--output-prefix",
                                          self.folder / "out", *flags),
                                  input=gzip.compress(b"text\n"), capture_output=True, check=False)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(b"input - is a gzip file, not text.", done.stderr)
            self.assertEqual([path.name for path in self.folder.iterdir()], [])

    def test_disk_full_while_saving(self):
        # The limit's signal is left as it is: the program itself must see to it.
        copy = self.folder / "run"
        shutil.copytree(HERE.folder / "run", copy)
        before = hashes(copy / "checkpoints")
        done = run(*train("--load", copy, "--save", copy, iters=5), preexec_fn=limit_files(20_000))
        self.assertEqual(done.returncode, 1, done.stderr)
        *warnings, last = done.stderr.splitlines()
        failed = ("saving step 5 failed (earlier checkpoints are intact): FILE: cannot write N more "
                  "bytes: File too large.")
        late = "Warning: the last checkpoint, of step 5, was not saved: "
        self.assertEqual(
            [re.sub(rf"{copy}\S+:", "FILE:", re.sub(r"write \d+", "write N", line[len("12:34:56 "):]))
             for line in warnings],
            [late + failed + " Trying again in 1.00 s.", late + failed + " Trying again in 5.00 s.",
             "Warning: " + failed])
        self.assertEqual(last, "troupe: The last checkpoint, of step 5, could not be saved. The "
                               "checkpoint of step 3 is kept.")
        self.assertEqual(hashes(copy / "checkpoints"), before)

    def test_disk_full_while_logging(self):
        # It trains to the end, where saving fails for the same reason.
        save = self.folder / "save"
        done = run(*train("--save", save, iters=100), preexec_fn=limit_files(8000))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stderr.count("metrics.jsonl cannot be written: File too large"), 1,
                         done.stderr)
        self.assertIn("troupe: The last checkpoint, of step 100, could not be saved", done.stderr)
        self.assertEqual(list((save / "checkpoints").iterdir()), [])

    def test_disk_full_while_converting(self):
        self.refused(1, ["out", "File too large"], "convert", "--quiet", "--load", HERE.folder / "run",
                     "--save", self.folder / "out", preexec_fn=limit_files(10_000))
        self.assertEqual([path for path in self.folder.rglob("*") if path.is_file()], [])

    # ---- Numbers that are not finite ----

    def test_a_first_step_that_is_not_finite(self):
        self.refused(1, ["step 1", "--init-method-std", "Nothing was saved"],
                     *train("--init-method-std", 1e39, "--save", self.folder / "save"))
        self.assertFalse((self.folder / "save" / "checkpoints").exists())

    def test_a_run_that_diverges(self):
        save = self.folder / "save"
        done = run(*train("--save", save))
        self.assertEqual(done.returncode, 0, done.stderr)
        before = hashes(save / "checkpoints")
        # Weights of 1e30 after one update make every later gradient infinite.
        arguments = [argument if argument != "1e-3" else "1e30" for argument in
                     train("--load", save, "--save", save, "--weight-decay", 0,
                           "--override-opt_param-scheduler", iters=100)]
        self.refused(1, ["not finite", "--lr", "step 3 is kept"], *arguments)
        self.assertEqual(hashes(save / "checkpoints"), before)


if __name__ == "__main__":
    main()
