#!/usr/bin/env python3
"""Opens the pages of `troupe report` and `troupe inspect --html` in Chromium: no error, nothing loaded,
every chart drawn, nothing wider than the screen; in light and in dark mode, on a desktop's screen and
on a phone's. Part of `.ci/run browser`.

Usage: check_pages.py TROUPE SOURCE_FOLDER [FOLDER]     FOLDER: keep a picture of each view there
"""

import html
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
import program_runs
from program_runs import HERE, run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENS = {"desktop": 1280, "phone": 390}
PICTURES = None

# Runs before the page's own scripts, and looks at the page when these are done. The page is in a frame,
# whose width is exact; a window has a smallest one.
WATCH = """<script>
const problems = [];
addEventListener("error", event => problems.push(event.message));
addEventListener("securitypolicyviolation", event => problems.push("loads " + event.blockedURI));
addEventListener("load", () => setTimeout(() => {
  const canvases = [...document.querySelectorAll("canvas")];
  for (const canvas of canvases) {
    const pixels = canvas.width && canvas.height
      ? canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data : [];
    if (!pixels.some(value => value !== 0)) {
      problems.push("nothing is drawn: " + canvas.closest(".panel")?.textContent);
    }
  }
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) problems.push(`${wide} pixels wide on a screen of ${innerWidth}`);
  parent.postMessage({problems, canvases: canvases.length,
    loaded: performance.getEntriesByType("resource").map(each => each.name),
    dark: getComputedStyle(document.body).backgroundColor,
    titles: [...document.querySelectorAll("h2")].map(each => each.textContent)}, "*");
}, 300));
</script>"""


class Pages(unittest.TestCase):
    def look_at(self, page, screen, dark):
        """What WATCH found. One of the modes is the system's, as --force-dark-mode says."""
        name = f"{page.stem}-{screen}-{'dark' if dark else 'light'}"
        watched = HERE.folder / f"{name}.html"
        watched.write_text(page.read_text().replace("<head>", "<head>" + WATCH, 1))
        frame = HERE.folder / f"{name}-frame.html"
        width = SCREENS[screen]
        frame.write_text(f"""<!doctype html><body style="margin:0"><iframe src="{watched.name}"
            style="border:0;width:{width}px;height:1400px"></iframe><script>
            addEventListener("message", event => {{ document.body.dataset.found = JSON.stringify(event.data); }});
            </script>""")
        flags = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
                 "--hide-scrollbars", f"--user-data-dir={HERE.folder / 'profile'}", "--virtual-time-budget=5000",
                 f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        done = subprocess.run([*flags, f"--window-size={max(width, 500)},1400", "--dump-dom", frame.as_uri()],
                              capture_output=True, text=True, timeout=100, check=False)
        found = re.search(r'data-found="([^"]*)"', done.stdout)
        self.assertIsNotNone(found, f"{name}: the page did not answer. {done.stderr[-2000:]}")
        if PICTURES:
            subprocess.run([*flags, f"--window-size={max(width, 500)},1400",
                            f"--screenshot={PICTURES / name}.png", frame.as_uri()],
                           capture_output=True, timeout=100, check=True)
        return json.loads(html.unescape(found.group(1)))

    def check(self, page, canvases, titles):
        for screen in SCREENS:
            backgrounds = set()
            for dark in (False, True):
                with self.subTest(page=page.name, screen=screen, dark=dark):
                    found = self.look_at(page, screen, dark)
                    self.assertEqual(found["problems"], [])
                    self.assertEqual(found["loaded"], [])
                    self.assertEqual(found["canvases"], canvases)
                    self.assertEqual(found["titles"], titles)
                    backgrounds.add(found["dark"])
            self.assertEqual(len(backgrounds), 2, "the two modes look alike")

    def write_run(self, name, rate):
        """A run of a model that does not exist."""
        folder = HERE.folder / name
        folder.mkdir()
        lines = [{"header": True, "step": 0, "time": "2026-11-22T10:00:00.000Z", "version": "0.1.0",
                  "host": "node", "device": "cpu", "ranks": 2, "model": "small", "parameters": 10**6,
                  "active_parameters": 10**5, "matmul_limit_tflops": 2.0}]
        for step in range(1, 401):
            noise = math.sin(step * 12.9898) / 3
            loads = [{"layer": layer, "dead": int(step > 300), "dropped": 0.01, "entropy": 1.5,
                      "rows": [int(100 * math.exp(noise * (expert - 4) / 4)) * (expert > 0 or step <= 300)
                               for expert in range(8)]} for layer in range(6)]
            lines.append({"step": step, "time": f"2026-11-22T10:{step // 60:02}:{step % 60:02}.000Z",
                          "loss": 2 + 6 * math.exp(-step * rate) + noise / 5, "lr": rate / step,
                          "grad_norm": 1 + abs(noise), "tokens": 4096 * step, "tokens_per_s": 4096 + noise,
                          "tflops_per_gpu": 1.2 + noise / 9, "peak_bytes": 10**9, "load_imbalance": 1.4,
                          "load_balancing_loss": 1.1, "experts": loads} | ({"skipped": True} if step == 9 else {}))
            if step % 50 == 0:
                lines.append({"step": step, "time": lines[-1]["time"], "val_loss": 2.1 + 6 * math.exp(-step * rate),
                              "val_loss/code": 2 + 5 * math.exp(-step * rate)})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "options.toml").write_text(f"lr = {rate}\n")
        return folder

    def test_report(self):
        page = HERE.folder / "report.html"
        done = run("report", self.write_run("first", 0.02), self.write_run("second", 0.01), "--output", page)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check(page, 13, ["Overview", "Curves", "Experts", "Skipped steps and overflow",
                              "Options that differ"])

    def test_inspect(self):
        flags = ["--model", "mixtral-tiny", "--seq-length", 32, "--ranks", 2, "--expert-model-parallel-size", 2,
                 "--micro-batch-size", 2, "--global-batch-size", 8]
        bench = run("bench", *flags, "--quiet", "--json", "--profile", "--profile-dir", HERE.folder / "timelines")
        self.assertEqual(bench.returncode, 0, bench.stderr)
        (HERE.folder / "bench.json").write_text(bench.stdout)
        page = HERE.folder / "step.html"
        done = run("inspect", *flags, "--html", page, "--measured", HERE.folder / "bench.json",
                   "--measured", HERE.folder / "timelines" / "rank0_step1.json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check(page, 2, ["Memory", "What the peak is made of", "Queues",
                             "Work by kind, planned and measured", "Program"])


if __name__ == "__main__":
    if CHROMIUM is None:
        sys.exit("error: no Chromium: scripts/install_dependencies.sh browser")
    if len(sys.argv) > 3:
        PICTURES = pathlib.Path(sys.argv.pop(3)).resolve()
        PICTURES.mkdir(parents=True, exist_ok=True)
    program_runs.main()
