#!/usr/bin/env python3
"""`troupe report` and `troupe inspect --html`: pages hold the data of runs and programs and load
nothing; odd files of runs are said and never end in a crash; no other file is written over. What a
browser makes of the pages: tests/browser/check_pages.py.

Usage: report_test.py TROUPE SOURCE_FOLDER
"""

import html.parser
import json
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run, write_config, write_corpus

HEADER = {"header": True, "step": 0, "time": "2026-11-22T10:00:00.000Z", "version": "0.1.0",
          "commit": "abc", "host": "here", "device": "cpu", "ranks": 2, "model": "small",
          "parameters": 1000, "active_parameters": 500, "data": [], "options": "options.toml",
          "matmul_limit_tflops": 2.0}
INSPECT = ["inspect", "--model", "mixtral-tiny", "--seq-length", 16]


def step_line(step, **changes):
    return {"step": step, "time": f"2026-11-22T10:{step // 60:02}:{step % 60:02}.000Z",
            "loss": 5.0 - 0.01 * step, "lr": 0.001, "grad_norm": 1.0, "tokens": 64 * step,
            "tokens_per_s": 100.0, "tflops_per_gpu": 0.5, "peak_bytes": 1 << 20,
            "load_imbalance": 1.5,
            "experts": [{"layer": layer, "imbalance": 1.5, "dead": 1, "dropped": 0.0,
                         "entropy": 1.0, "rows": [3 * step, step, 0, 0]} for layer in (1, 2)],
            } | changes


class Page(html.parser.HTMLParser):
    """What a browser would see: the data, and what elements refer to."""

    def __init__(self, path):
        super().__init__()
        self.references, self.inside, self.data, self.texts = [], None, None, ""
        self.data_lines = 0
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.inside = attributes.get("id") if tag == "script" else tag
        self.references += [value for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_data(self, data):
        if self.inside == "data" and self.data is None:
            self.data = json.loads(data)
            self.data_lines = data.strip().count("\n") + 1
        elif self.inside == "style":
            self.texts += data

    def handle_endtag(self, tag):
        self.inside = None


class Report(unittest.TestCase):
    def write_run(self, name, lines, options="lr = 0.001\n"):
        folder = HERE.folder / name
        folder.mkdir()
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (folder / "metrics.jsonl").write_text("\n".join(texts) + "\n")
        if options is not None:
            (folder / "options.toml").write_text(options)
        return folder

    def report(self, *arguments):
        """The text, the JSON and the page."""
        text, document = run("report", *arguments), run("report", *arguments, "--json")
        for result in (text, document):
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(result.stderr, "")
        self.assertLessEqual(max(map(len, text.stdout.splitlines())), 80)
        document = json.loads(document.stdout)
        return " ".join(text.stdout.split()), document, Page(pathlib.Path(document["page"]))

    def assert_self_contained(self, page):
        self.assertEqual(page.references, [])
        self.assertEqual(page.data_lines, 1, "data are not laid out for people")
        self.assertNotRegex(page.texts, r"url\(|@import")
        self.assertIn("default-src 'none'", page.text)
        # The names of projects in the comments of the library's licence.
        self.assertEqual(set(re.findall(r"https?://[\w./#-]+", page.text)),
                         {"https://www.chartjs.org", "https://github.com/kurkle/color#readme"})
        self.assertIn("The MIT License", page.text)
        self.assertLess(len(page.text), 1 << 20)

    def test_a_real_run(self):
        write_config()
        write_corpus(20, 60)
        save = HERE.folder / "real"
        trained = run("train", "--quiet", "--model", HERE.folder / "config.json", "--data-path",
                      HERE.folder / "corpus", "--seq-length", 16, "--train-iters", 6, "--lr", 0.01,
                      "--eval-interval", 3, "--eval-iters", 1, "--save", save)
        self.assertEqual(trained.returncode, 0, trained.stderr)
        text, document, page = self.report(save)
        self.assertEqual(document["page"], str(save / "report.html"))
        self.assert_self_contained(page)
        self.assertEqual(page.data, {name: value for name, value in document.items() if name != "page"})
        logged = metrics(save)
        steps = [line for line in logged if "loss" in line]
        shown = document["runs"][0]
        for name in ("loss", "lr", "grad_norm", "tokens_per_s", "load_imbalance"):
            self.assertEqual(shown["curves"][name],
                             {"steps": [line["step"] for line in steps],
                              "values": [line[name] for line in steps]})
        self.assertEqual(shown["evaluations"]["val_loss"]["values"],
                         [line["val_loss"] for line in logged if "val_loss" in line])
        self.assertEqual(shown["loads"]["first_steps"], [1, 2, 3, 4, 5, 6])
        rows = steps[2]["experts"][1]["rows"]
        for percent, count in zip(shown["loads"]["layers"][1]["percent_of_mean"][2], rows):
            self.assertLess(abs(percent - 100 * count * len(rows) / sum(rows)), 1)
        limit = max(shown["starts"][0]["matmul_limit_tflops"],
                    *(line["tflops_per_gpu"] for line in steps))
        self.assertEqual(shown["curves"]["limit_share"]["values"],
                         [line["tflops_per_gpu"] / limit for line in steps])
        self.assertIn(f"loss {steps[0]['loss']:.4f} at step 1, {steps[-1]['loss']:.4f} at step 6", text)
        names = [row["name"] for row in document["options"]]
        self.assertIn("seq-length", names)
        self.assertNotIn("adam-beta1", names)  # has its default
        self.assertNotIn("note", text)

    def test_several_runs_and_what_went_wrong_in_them(self):
        first = self.write_run("one", [
            HEADER, *map(step_line, range(1, 4)), step_line(4, skipped=True, grad_norm=None),
            step_line(5, expert_rooms_lacked=3, expert_room_needed=1.31),
            step_line(6, expert_rooms_lacked=1, expert_room_needed=1.25)])
        other = self.write_run("two", [HEADER, step_line(1), step_line(2)],
                               'lr = 0.002\nnew-option = ["a", "b"]\n')
        output = HERE.folder / "both.html"
        text, document, page = self.report(first, other, "--output", output)
        self.assertEqual([each["name"] for each in page.data["runs"]], ["one", "two"])
        self.assertEqual(document["options"], [{"name": "lr", "values": ["0.001", "0.002"]},
                                               {"name": "new-option", "values": [None, "a b"]}])
        self.assertIn("Options that differ lr 0.001 | 0.002 new-option not given | a b", text)
        one = document["runs"][0]
        self.assertEqual(one["skipped"], [4])
        self.assertEqual(one["overflows"], [{"step": 5, "rooms_lacked": 3.0, "room_needed": 1.31},
                                            {"step": 6, "rooms_lacked": 1.0, "room_needed": 1.25}])
        self.assertIn("--moe-expert-rank-capacity-factor 1.31 would do", text)
        self.assertEqual(one["curves"]["grad_norm"]["steps"], [1, 2, 3, 5, 6])
        self.assertEqual(one["curves"]["dead_experts"]["values"], [2.0] * 6)
        self.assertEqual(one["loads"]["layers"][0]["percent_of_mean"][0], [300, 100, 0, 0])
        self.assertEqual(one["summary"]["limit_share"], 0.25)
        self.assertEqual(one["summary"]["room_needed"], 1.31)
        self.assertEqual(one["axes"]["seconds"], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def test_lines_that_are_no_metrics_are_counted(self):
        cut = json.dumps(step_line(9))[:40]
        folder = self.write_run("odd", [
            HEADER, step_line(1), "", "[" * 1000, '{"step": -1, "loss": 1}', step_line(2, loss="low"),
            step_line(3), step_line(3), step_line(4, experts=[{"layer": 1, "rows": [1]}]),
            step_line(5, experts=7), "\0\0\0", cut], options="= nothing\n")
        with open(folder / "metrics.jsonl", "rb+") as file:  # without the last newline
            file.truncate((folder / "metrics.jsonl").stat().st_size - 1)
        _, document, _ = self.report(folder)
        notes = document["runs"][0]["notes"]
        self.assertEqual(document["runs"][0]["curves"]["loss"]["steps"], [1, 3, 4])
        self.assertEqual(notes[:4], [
            "metrics.jsonl: line 12, the last, is cut; it is left out.",
            "metrics.jsonl: 6 lines are not a line of metrics, the first of them line 3; they are "
            "left out.",
            "metrics.jsonl: line 8 is of a step that is not after the one before; it is left out.",
            "metrics.jsonl: line 9 is with experts that are not those of the steps before; it is "
            "left out."])
        self.assertIn("options.toml:1", notes[4])

    def test_steps_stand_beside_their_plan(self):
        times = (0.5, 0.375, 0.25, 0.5, 0.75)
        text, document, _ = self.report(self.write_run("planned", [HEADER, *(
            step_line(step, step_time_s=seconds, planned_step_time_s=0.4)
            for step, seconds in enumerate(times, 1))]))
        self.assertIn("step 500.0 ms (median), 400.0 ms planned: 1.25 times as long", text)
        summary = document["runs"][0]["summary"]
        self.assertEqual(summary["step_time_s"], 0.5)
        self.assertEqual(summary["planned_step_time_s"]["value"], 0.4)
        text, document, _ = self.report(self.write_run("without", [HEADER, step_line(1, step_time_s=0.5)]))
        self.assertNotIn("planned", text)
        self.assertIsNone(document["runs"][0]["summary"]["planned_step_time_s"])

    def test_a_run_without_steps(self):
        text, document, _ = self.report(self.write_run("fresh", [HEADER]))
        self.assertIn("No step has been logged.", text)
        self.assertEqual(document["runs"][0]["curves"], {})
        text, _, _ = self.report(self.write_run("empty", [], options=None))
        self.assertIn("the folder has no options.toml", text)

    def test_long_runs_are_thinned_out_with_their_extremes(self):
        lines = [step_line(step, time="2026-11-22T10:00:00.000Z", experts=[]) for step in range(1, 9001)]
        lines[4321]["grad_norm"] = 77.0
        _, document, _ = self.report(self.write_run("long", [HEADER, *lines]))
        curve = document["runs"][0]["curves"]["grad_norm"]
        self.assertLessEqual(len(curve["steps"]), 2000)
        self.assertEqual((curve["steps"][0], curve["steps"][-1]), (1, 9000))
        self.assertIn((4322, 77.0), list(zip(curve["steps"], curve["values"])))

    def test_names_from_outside_do_not_leave_the_data(self):
        evil = "</script><script>alert(1)</script>"
        folder = self.write_run("evil", [HEADER | {"model": evil}, step_line(1, **{evil: 1.0})])
        _, _, page = self.report(folder)
        self.assertEqual(page.data["runs"][0]["model"], evil)
        self.assertNotIn(evil, page.text)

    def assert_refused(self, arguments, *words):
        result = run(*arguments)
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertEqual(result.stdout, "")
        for word in words:
            self.assertIn(word, result.stderr)

    def test_refusals(self):
        folder = self.write_run("fine", [HEADER, step_line(1)])
        other = HERE.folder / "notes.html"
        other.write_text("<!doctype html>\nmine")
        self.assert_refused(["report", folder, "--output", other], "--output", "no page of troupe report")
        self.assertEqual(other.read_text(), "<!doctype html>\nmine")
        self.assert_refused([*INSPECT, "--html", other], "--html", "no page of troupe inspect")
        self.assert_refused(["report", folder, "--output", HERE.folder / "none" / "x.html"], "no folder")
        self.assert_refused(["report", folder, "--output", HERE.folder], "no page of troupe report")
        self.assert_refused(["report", HERE.folder / "nowhere"], "no such folder", "--save")
        self.assert_refused(["report", HERE.folder], "no metrics.jsonl")
        self.assert_refused(["report", folder, f"{folder}/"], "given twice")
        self.assert_refused(["report"], "RUN")
        self.assert_refused([*INSPECT, "--measured", other], "--html FILE")
        self.assert_refused([*INSPECT, "--html", HERE.folder / "x.html", "--json"], "--json")

    def test_step_page_shows_what_inspect_prints(self):
        path = HERE.folder / "step.html"
        for _ in range(2):  # it may be replaced
            result = run(*INSPECT, "--html", path, "--micro-batch-size", 2)
            self.assertEqual(result.returncode, 0, result.stderr)
        page = Page(path)
        self.assert_self_contained(page)
        whole = json.loads(run(*INSPECT, "--json", "--micro-batch-size", 2).stdout)
        data = page.data
        # What prints the same; not the page itself.
        self.assertEqual(data["command"], "troupe inspect --model mixtral-tiny --seq-length 16 "
                                          "--micro-batch-size 2")
        self.assertEqual(data["plan"]["bytes"] | {"total": data["plan"]["total_bytes"]},
                         whole["plan"]["bytes"])
        operations = whole["operations"]
        self.assertEqual([data["operations"]["kinds"][i] for i in data["operations"]["kind"]],
                         [op["kind"] for op in operations])
        live = [sum(role[i] for role in data["memory"]["bytes"].values())
                for i in range(len(data["memory"]["operations"]))]
        self.assertEqual(live, [operations[at]["live_bytes"] for at in data["memory"]["operations"]])
        peak = data["peak"]
        self.assertEqual(peak["bytes"], whole["plan"]["largest_live_bytes"])
        self.assertEqual(operations[peak["operation"]]["live_bytes"], peak["bytes"])
        self.assertEqual(peak["values"], sorted(peak["values"], key=lambda value: -value["bytes"]))
        if peak["names"] == len(peak["values"]):
            self.assertEqual(sum(value["bytes"] for value in peak["values"]), peak["bytes"])
        text = run(*INSPECT, "--micro-batch-size", 2).stdout
        for line in data["lines"]:
            self.assertIn(line, text)

    def test_step_page_shows_the_fullest_operation_of_each_stretch(self):
        path = HERE.folder / "long.html"
        flags = ["--micro-batch-size", 1, "--global-batch-size", 4, "--num-layers", 4]
        result = run(*INSPECT, *flags, "--html", path)
        self.assertEqual(result.returncode, 0, result.stderr)
        data = Page(path).data
        live = [op["live_bytes"] for op in json.loads(run(*INSPECT, *flags, "--json").stdout)["operations"]]
        shown = data["memory"]["operations"]
        self.assertLess(len(shown), len(live), "more operations than columns")
        for column, at in enumerate(shown):
            stretch = live[column * len(live) // len(shown):(column + 1) * len(live) // len(shown)]
            self.assertEqual(live[at], max(stretch), column)
            self.assertEqual(sum(role[column] for role in data["memory"]["bytes"].values()), live[at])

    def test_step_page_says_how_long_the_largest_values_live(self):
        # With two micro-batches in flight, the values of the first die before those of the second.
        flags = ["--ranks", 2, "--pipeline-model-parallel-size", 2, "--num-layers", 2,
                 "--global-batch-size", 4]
        path = HERE.folder / "stages.html"
        result = run(*INSPECT, *flags, "--html", path)
        self.assertEqual(result.returncode, 0, result.stderr)
        peak = Page(path).data["peak"]
        whole = json.loads(run(*INSPECT, *flags, "--json").stdout)
        uses = {}
        for op in whole["operations"]:
            for value in op["inputs"] + op["outputs"]:
                uses.setdefault(value, []).append(op["index"])
        named = {}
        for value in whole["values"]:
            used = uses.get(value["id"], [])
            if used and used[0] <= peak["operation"] <= used[-1]:
                named.setdefault((value["name"], value["role"]), []).append(used)
        checked = 0
        for value in peak["values"]:
            used = named.get((value["name"], value["role"]), [])
            # Other values may be stored over one of them; then it seems to live longer.
            if len(used) < 2 or len(used) != value["count"]:
                continue
            checked += 1
            self.assertEqual(value["first"], min(each[0] for each in used), value)
            self.assertGreaterEqual(value["last"], max(each[-1] for each in used), value)
        self.assertGreater(checked, 0)

    def test_step_page_beside_measurements(self):
        flags = ["--model", "mixtral-tiny", "--num-layers", 1, "--seq-length", 16]
        bench = HERE.folder / "bench.json"
        result = run("bench", *flags, "--json", "--quiet", "--profile", "--profile-dir", HERE.folder / "profile")
        self.assertEqual(result.returncode, 0, result.stderr)
        bench.write_text(result.stdout)
        timeline = HERE.folder / "profile" / "rank0_step1.json"
        path = HERE.folder / "measured.html"
        result = run("inspect", *flags, "--html", path, "--measured", bench, "--measured", timeline)
        self.assertEqual(result.returncode, 0, result.stderr)
        data = Page(path).data
        self.assertEqual(data["measured"]["bench"]["allocated_bytes"], data["plan"]["total_bytes"])
        self.assertEqual({span[0] for span in data["measured"]["spans"]},
                         set(range(len(data["operations"]["kind"]))))
        # One operation more than there are.
        trace = json.loads(timeline.read_text())
        last = [event for event in trace["traceEvents"] if "operation" in event.get("args", {})][-1]
        last["args"]["operation"] = len(data["operations"]["kind"])
        longer = HERE.folder / "longer.json"
        longer.write_text(json.dumps(trace))
        self.assert_refused(["inspect", *flags, "--html", path, "--measured", longer],
                            "another program")
        other = ["inspect", "--model", "mixtral-tiny", "--seq-length", 16, "--html", path, "--measured"]
        self.assert_refused([*other, bench], "another program")
        # Of other ranks alone, and an operation without its time.
        for change, phrase in (({"pid": 3}, "the timeline has no operations of rank 0."),
                               ({"dur": None}, "dur")):
            trace = json.loads(timeline.read_text())
            for event in trace["traceEvents"]:
                event.update(change)
                if change.get("dur", 0) is None:
                    event.pop("dur")
            longer.write_text(json.dumps(trace))
            self.assert_refused(["inspect", *flags, "--html", path, "--measured", longer], phrase)
        odd = HERE.folder / "odd.json"
        for text, phrase in (("[1]", "neither"),
                             ('{"traceEvents": [{"ph": 5}]}',
                              f"--measured {odd}: this is not as bench --json or --profile write it: "
                              "type must be string, but is number.")):
            odd.write_text(text)
            self.assert_refused([*other, odd], phrase)


if __name__ == "__main__":
    main()
